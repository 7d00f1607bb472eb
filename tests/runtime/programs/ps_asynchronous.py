# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Trainings whose result does not depend on the order in which gradients arrive.

    ps_asynchronous.py RESULTS CASE...

Runs on two ranks under asynchronous parameter servers. The loss is the mean of w * x,
so that a batch's gradient is the mean of its x, whatever w is. The tests read the
weights of the last rank, which waits for the chief.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.kit.waiting import eventually

RANK = int(os.environ.get("TFCLUSTER_RANK", "0"))
SIZE = int(os.environ.get("TFCLUSTER_SIZE", "1"))


class Product(keras.layers.Layer):
    """w * x, with a given initial w."""

    def __init__(self, first=1.0, **kwargs):
        super().__init__(**kwargs)
        self.first = first

    def build(self, shape):
        self.w = self.add_weight(
            name="w",
            shape=(int(shape[-1]),),
            initializer=keras.initializers.Constant(self.first),
        )

    def call(self, x):
        return x * self.w


def product(optimizer=None, columns=1, first=1.0, **kwargs):
    model = keras.Sequential(
        [keras.Input((columns,)), Product(first, name="product", dtype="float32")]
    )
    model.compile(
        optimizer or keras.optimizers.SGD(0.1),
        lambda y, p: keras.ops.sum(p, axis=-1),
        **kwargs,
    )
    return model


def train(model, x, batch_size=1, **kwargs):
    x = np.asarray(x, "float32").reshape(len(x), -1)
    model.fit(
        x, np.zeros(len(x)), batch_size=batch_size, shuffle=False, verbose=0, **kwargs
    )
    return model


def server_models():
    """The runtime's own ServerModels, to which programs have no access."""
    from tfcluster.runtime.keras.strategies.ps_models import ServerModels

    return next(found for found in gc.get_objects() if type(found) is ServerModels)


def weights(model):
    return {f"w{i}": weight for i, weight in enumerate(model.get_weights())}


def wait_for(sign):
    eventually(sign.exists, f"no rank has made {sign}", 180.0)


def case_sums():
    """Two ranks push each of four batches once."""
    seen: list[Any] = []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(batch)
    )
    model = train(product(), [1.0, 2.0, 3.0, 4.0], callbacks=[count])
    return {**weights(model), "batches": np.array(len(seen))}


def case_parts():
    """The mean over the two rows of a batch, then over two batches."""
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    return weights(train(product(optimizer), [1.0, 3.0, 5.0, 9.0], batch_size=2))


def case_clipped():
    return weights(train(product(keras.optimizers.SGD(0.1, clipvalue=1.5)), [1.0, 5.0]))


def case_fewer_batches_than_ranks():
    return weights(train(product(), [2.0], epochs=3))


def case_one_batch_unforeseen():
    """A dataset of unknown length with one batch, for two epochs."""
    dataset = tf.data.Dataset.from_generator(
        lambda: iter([([[2.0]], [0.0])]),
        output_signature=(tf.TensorSpec((1, 1)), tf.TensorSpec((1,))),
    )
    model = product()
    model.fit(dataset, epochs=2, verbose=0)
    return weights(model)


def case_uneven():
    return weights(train(product(), [1.0, 1.0, 1.0, 4.0, 4.0], batch_size=2))


def case_not_finite():
    """The gradient of one of the two batches is not finite, and is skipped."""
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=8.0
    )
    return weights(train(product(optimizer), [2.0, np.inf]))


def case_frozen():
    model = keras.Sequential(
        [
            keras.Input((1,)),
            Product(2.0, name="frozen", trainable=False),
            Product(1.0, name="trained"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), lambda y, p: keras.ops.sum(p, axis=-1))
    return weights(train(model, [1.0, 2.0]))


def case_unused():
    """A variable without a gradient."""

    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.unused = Product(name="used"), Product(name="unused")

        def build(self, shape):
            self.used.build(shape)
            self.unused.build(shape)

        def call(self, x):
            return self.used(x)

    model = Two()
    model.build((None, 1))
    model.compile(keras.optimizers.SGD(0.1), lambda y, p: keras.ops.sum(p, axis=-1))
    return weights(train(model, [1.0, 2.0]))


def size(of):
    """The bytes of an array, of rows, or of None (0)."""
    return getattr(getattr(of, "values", of), "nbytes", 0)


def case_rows():
    """Only rows are sent: few of the 20,000 rows of 8 floats are used."""
    model = keras.Sequential(
        [keras.Input((2,), dtype="int32"), keras.layers.Embedding(20_000, 8)]
    )
    model.compile(keras.optimizers.SGD(1.0), lambda y, p: keras.ops.sum(p, axis=(1, 2)))
    from tfcluster.runtime.parameter_server.client import ParameterServerClient

    moved, push = [], ParameterServerClient.push

    def counted(self, name, gradients, **kwargs):
        fresh = push(self, name, gradients, **kwargs)
        moved.append(sum(map(size, [*gradients, *fresh])))
        return fresh

    servers: Any = ParameterServerClient
    servers.push = counted
    x = np.array([[1, 2], [2, 19_999], [3, 3], [5, 6]])
    try:
        model.fit(x, np.zeros(4), batch_size=1, shuffle=False, verbose=0)
    finally:
        servers.push = push
    table = model.get_weights()[0]
    return {
        "table": np.round(table[[1, 2, 3, 5, 6, 19_999, 4]]).sum(1),
        "moved": np.array(moved),
    }


def case_loop():
    """All ranks take the first batch; later batches and passes are divided."""
    model, optimizer = product(), keras.optimizers.SGD(0.1)
    dataset = tf.data.Dataset.from_tensor_slices(np.eye(8, dtype="float32")).batch(1)
    model = product(columns=8)
    seen: list[Any] = []

    @tf.function
    def step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(batch))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )

    for _ in range(2):
        seen.append([])
        for batch in dataset:
            seen[-1].append(int(np.argmax(batch)))
            step(batch)
    everything = [int(np.argmax(batch)) for batch in dataset.map(lambda batch: batch)]
    return {
        "first": np.array(seen[0]),
        "second": np.array(seen[1]),
        "other": np.array(everything),
        "weights": model.get_weights()[0],
    }


def case_on_batch():
    """Calls of train_on_batch are divided between the ranks, too."""
    model = product()
    for x in (1.0, 1.0, 1.0, 1.0):
        logs = model.train_on_batch(np.array([[x]]), np.array([0.0]), return_dict=True)
    return {"steps": model.optimizer.iterations.numpy(), "loss": np.array(logs["loss"])}


class AllHavePushed(keras.callbacks.Callback):
    """Delays the end of an epoch until the last rank has pushed."""

    def __init__(self, what):
        super().__init__()
        self.sign = Path(f"pushed-{what}")

    def on_train_batch_end(self, batch, logs=None):
        if RANK == SIZE - 1:
            self.sign.touch()

    def on_epoch_end(self, epoch, logs=None):
        wait_for(self.sign)


def case_saved():
    """The chief saves; the optimizer's variables are fetched from the servers."""
    optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
    callbacks = [AllHavePushed("to be saved")]
    model = train(product(optimizer), [1.0, 1.0], callbacks=callbacks)
    model.save("saved.keras")
    loaded = keras.models.load_model(
        "saved.keras", custom_objects={"Product": Product}, compile=False
    )
    other = product(keras.optimizers.SGD(0.1, momentum=0.5))
    other.optimizer.build(other.trainable_variables)
    other.load_weights("saved.keras")
    return {**weights(loaded), "momentum": other.optimizer.variables[-1].numpy()}


def case_stopped():
    """The chief's callbacks decide when training stops."""

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = RANK != 0 or epoch >= 2

    model = product()
    train(model, [1.0, 1.0], epochs=100_000, callbacks=[Stop()])
    return {"epochs": np.array(len(model.history.epoch))}


def case_rate():
    """The chief sets the learning rate to zero after all ranks' first epoch."""

    class Rate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if RANK == 0:
                self.model.optimizer.learning_rate = 0.0

        def on_epoch_begin(self, epoch, logs=None):
            if RANK == 0 and epoch == 1:
                Path("rate").touch()
            if RANK != 0 and epoch == 1:
                wait_for(Path("rate"))

    callbacks = [AllHavePushed("at the old rate"), Rate()]
    return weights(train(product(), [1.0, 1.0], epochs=3, callbacks=callbacks))


def case_averaged():
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    callbacks = [AllHavePushed("to be averaged")]
    return weights(train(product(optimizer), [1.0, 1.0], callbacks=callbacks))


def case_late():
    """A rank that is late starts with the servers' weights, not with its own."""
    model = product(keras.optimizers.SGD(0.0), first=float(RANK + 1))

    class Begun(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            Path("begun").touch()

    if RANK != 0:
        wait_for(Path("begun"))
    history = train(model, [1.0, 1.0], callbacks=[Begun()]).history.history
    return {**weights(model), "loss": np.array(history["loss"][0])}


def case_chief_first():
    """The chief ends its epochs before the other rank has pushed anything."""
    ended = Path("chief-ended")
    seen: list[Any] = []

    class Ends(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if RANK != 0:
                wait_for(ended)

        def on_epoch_end(self, epoch, logs=None):
            if RANK == 0:
                ended.touch()

        def on_train_end(self, logs=None):
            seen.append(self.model.get_weights()[0])

    model = train(product(), [1.0, 2.0, 3.0, 4.0], callbacks=[Ends()])
    return {**weights(model), "seen": np.array(seen)}


def case_wrong():
    """A layer has a different name on each rank; the chief comes last, and fails."""
    first = Path("first-began")
    begins = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: first.touch()
    )
    if RANK == 0:
        wait_for(first)
    model = keras.Sequential([keras.Input((1,)), Product(name=f"layer{RANK}")])
    model.compile(keras.optimizers.SGD(0.1), lambda y, p: keras.ops.sum(p, axis=-1))
    try:
        train(model, [1.0, 1.0], callbacks=[begins])
    except Exception as error:
        return {"error_text": np.array(f"{type(error).__name__}: {error}")}
    return {"error_text": np.array("")}


def main(path, *chosen):
    found: dict[str, Any] = {}
    for name, case in list(globals().items()):
        if not name.startswith("case_") or name[5:] not in chosen:
            continue
        try:
            outcome = case()
        except Exception:
            outcome = {"error": np.array(traceback.format_exc())}
            print(name, outcome["error"], flush=True)
        found |= {f"{name[5:]}/{key}": value for key, value in outcome.items()}
        print(name, "done", flush=True)
    np.savez(f"{path}-{RANK}.npz", **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
