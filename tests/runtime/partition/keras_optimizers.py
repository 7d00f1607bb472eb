"""Instances of the optimizers of Keras, and a step to trace them with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import keras
import tensorflow as tf

WITHOUT_CASE: Mapping[str, str] = {
    "Optimizer": "it is abstract",
    "OptimizerMap": "it maps names to optimizers",
    "deserialize": "it is no optimizer",
    "serialize": "it is no optimizer",
    "get": "it is no optimizer",
}
NAMES = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lamb"),
    *("Lion", "LossScaleOptimizer", "MultiOptimizer", "Muon", "Nadam", "RMSprop"),
    *("SGD", "ScheduleFreeAdamW"),
)
# The base class of all optimizers applies these.
_SETTINGS: tuple[Mapping[str, Any], ...] = (
    {},
    {"clipnorm": 1.0},
    {"clipvalue": 0.5},
    {"global_clipnorm": 1.0},
    {"weight_decay": 0.01},
    {"use_ema": True, "ema_overwrite_frequency": 3},
    {"loss_scale_factor": 8.0},
    {"gradient_accumulation_steps": 2},
)
_MORE: Mapping[str, list[Mapping[str, Any]]] = {
    "Adam": [{"amsgrad": True}],
    "RMSprop": [{"centered": True, "momentum": 0.9}],
    "SGD": [{"momentum": 0.9, "nesterov": True}],
}


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The name and the maker of each optimizer."""
    for name in NAMES:
        make = getattr(keras.optimizers, name, None)
        if make is None:
            continue
        if name == "LossScaleOptimizer":
            yield name, partial(make, keras.optimizers.Adam())
        elif name == "MultiOptimizer":
            yield name, partial(_multiple, make)
        else:
            common = _SETTINGS if name == "SGD" else ({},)
            for settings in (*common, *_MORE.get(name, [])):
                yield name, partial(make, **settings)
    for schedule in (
        keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9),
        keras.optimizers.schedules.CosineDecayRestarts(0.1, 10),
        keras.optimizers.schedules.PiecewiseConstantDecay([3, 5], [0.1, 0.2, 0.3]),
        keras.optimizers.schedules.PolynomialDecay(0.1, 10, cycle=True),
        keras.optimizers.schedules.InverseTimeDecay(0.1, 10, 0.9),
        keras.optimizers.schedules.CosineDecay(0.1, 10, warmup_steps=3),
    ):
        yield type(schedule).__name__, partial(keras.optimizers.SGD, schedule)


def _multiple(make: Any) -> Any:
    chosen = keras.optimizers.OptimizerMap(default_optimizer=keras.optimizers.Adam())
    chosen["embed"] = keras.optimizers.SGD()
    return make(chosen)


def step(optimizer: Any) -> Callable[..., Any]:
    """A training step with an embedding, whose gradient is sparse, and a matrix."""
    model = keras.Sequential([keras.layers.Embedding(9, 4), keras.layers.Dense(3)])
    model.build((None, 5))
    variables = model.trainable_variables
    optimizer.build(variables)

    def run(tokens: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tokens) ** 2)
            if hasattr(optimizer, "scale_loss"):
                loss = optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, [each.value for each in variables])
        if optimizer.gradient_accumulation_steps or optimizer.loss_scale_factor:
            # Keras can neither add up nor scale sparse gradients.
            gradients = [tf.convert_to_tensor(each) for each in gradients]
        optimizer.apply(gradients, variables)
        return loss

    return run
