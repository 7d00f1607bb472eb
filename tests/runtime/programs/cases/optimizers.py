# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Optimizers and their options."""

from __future__ import annotations

import keras
import numpy as np

from tests.runtime.programs.cases.tools import (
    EPOCHS,
    ROWS,
    classifier,
    compiled,
    data,
    main,
    results,
)


def case_clipped():
    x, y = data()
    optimizer = keras.optimizers.SGD(1.0, global_clipnorm=0.05)
    model = compiled(classifier(), optimizer)
    return results(model, model.fit(10 * x, y, batch_size=16, epochs=2, verbose=0))


def case_accumulated():
    x, y = data()
    optimizer = keras.optimizers.Adam(
        0.01, gradient_accumulation_steps=2, use_ema=True, weight_decay=0.01
    )
    model = compiled(classifier(), optimizer)
    return results(model, model.fit(x, y, batch_size=8, epochs=2, verbose=0))


def case_mixed_precision():
    x, y = data()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = compiled(classifier(), keras.optimizers.Adam(0.01))
        optimizer = model.optimizer
        history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    finally:
        keras.config.set_dtype_policy("float32")
    return {
        **results(model, history),
        "scale": optimizer.dynamic_scale.numpy(),
        "wrapped": np.array(isinstance(optimizer, keras.optimizers.LossScaleOptimizer)),
    }


def case_overflow():
    """Gradients are infinite on one rank only, and no rank takes the step."""
    x, y = data(48)
    x[1] = np.inf
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = compiled(classifier(), keras.optimizers.SGD(0.01))
        model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    finally:
        keras.config.set_dtype_policy("float32")
    return {
        **results(model),
        "scale": model.optimizer.dynamic_scale.numpy(),
        "taken": np.array(int(model.optimizer.inner_optimizer.iterations)),
    }


def case_sum_overflows():
    """A gradient is infinite, although the term of each rank is not."""
    x, y = data(48)
    scales = []
    keras.config.set_dtype_policy("mixed_float16")
    try:
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.05), initial_scale=2.0**17, dynamic_growth_steps=2
        )
        model = compiled(classifier(), optimizer)
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: scales.append(
                float(optimizer.dynamic_scale)
            )
        )
        model.fit(
            10 * np.abs(x), y, batch_size=16, epochs=4, shuffle=False, verbose=0,
            callbacks=[note],
        )  # fmt: skip
    finally:
        keras.config.set_dtype_policy("float32")
    return {**results(model), "scales": np.array(scales)}


def trained(optimizer, epochs=EPOCHS, rows=ROWS):
    x, y = data(rows)
    model = compiled(classifier(), optimizer)
    return results(model, model.fit(x, y, batch_size=16, epochs=epochs, verbose=0))


def case_clipnorm():
    return trained(keras.optimizers.SGD(0.3, clipnorm=0.02))


def case_clipvalue():
    return trained(keras.optimizers.SGD(0.3, clipvalue=0.005))


def case_accumulated_in_many():
    """Every third batch applies a step, also across the end of an epoch."""
    return trained(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3))


def case_averaged_weights():
    """The end of training sets the weights to their moving averages."""
    optimizer = keras.optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=7
    )
    return trained(optimizer)


def case_weights_that_decay_fast():
    """Weights change fast from step to step: no rank may be reported as different."""
    x, y = data()
    layers = [keras.layers.Dense(400, activation="tanh") for _ in range(3)]
    model = keras.Sequential(
        [keras.Input((6,)), *layers, keras.layers.Dense(2, activation="softmax")]
    )
    model = compiled(model, keras.optimizers.SGD(1e-3, weight_decay=20.0))
    return results(model, model.fit(x, y, batch_size=5, epochs=4, verbose=0))


def case_weight_decay():
    return trained(keras.optimizers.AdamW(0.003, weight_decay=0.05))


def case_schedule():
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, 40, warmup_target=0.1, warmup_steps=8
    )
    optimizer = keras.optimizers.SGD(schedule, momentum=0.5, nesterov=True)
    found = trained(optimizer)
    found["steps"] = np.array(int(optimizer.iterations))
    found["rate"] = np.array(float(optimizer.learning_rate))
    return found


def case_others():
    """A short run of other optimizers, whose slots must be equal, too."""
    found = {}
    for optimizer in (
        keras.optimizers.RMSprop(0.003, momentum=0.5, centered=True),
        keras.optimizers.Adagrad(0.03),
        keras.optimizers.Lion(0.0005),
    ):
        keras.utils.set_random_seed(2)
        for key, value in trained(optimizer, epochs=2, rows=50).items():
            found[f"{optimizer.name}_{key}"] = value
    return found


def case_mixed_bfloat16():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        return trained(keras.optimizers.Adam(0.003), epochs=2, rows=50)
    finally:
        keras.config.set_dtype_policy(keras.config.floatx())


def case_loss_scaled_float32():
    """Loss scaling alone, without the rounding of half precision."""
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.003), initial_scale=1024.0, dynamic_growth_steps=20
    )
    found = trained(optimizer)
    found["scale"] = np.array(float(optimizer.dynamic_scale.numpy()))
    return found


if __name__ == "__main__":
    main(globals())
