# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""The weights of synchronous ranks and of their parameter servers, step by step.

ps_synchronous.py RESULTS [CASE...]
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np

from tests.runtime.programs.cases.tools import RANK, classifier, compiled, data
from tests.runtime.programs.ps_asynchronous import (
    product,
    server_models,
    train,
    weights,
)


def case_steps():
    """After each step the weights equal those of the parameter servers."""
    from tfcluster.runtime.parameter_server.connections import Connections

    exchange, exchanges = Connections.exchange, []

    def counted(self, requests):
        exchanges.append([m.header["op"] for m in requests.values()])
        return exchange(self, requests)

    differences, talks = [], []

    class Look(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            exchanges.clear()

        def on_train_batch_end(self, batch, logs=None):
            talks.append(list(exchanges))
            if self.model.optimizer.iterations.numpy() % 2:
                found = server_models()
                kept = found.servers.pull(found._models[-1].key)
                own = [v.numpy() for v in self.model.trainable_variables]
                differences.append(
                    max(np.abs(a - b).max() for a, b in zip(kept, own, strict=True))
                )

    x, y = data(rows=97)
    model = compiled(classifier(keras.layers.BatchNormalization()))
    connections: Any = Connections
    connections.exchange = counted
    try:
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[Look()])
    finally:
        connections.exchange = exchange
    later = talks[1:]
    return {
        **weights(model),
        "differences": np.array(differences),
        "talks": np.array([len(talk) for talk in later]),
        "verbs": np.array(sorted({op for talk in later for ops in talk for op in ops})),
    }


def case_averages():
    """BatchNormalization's moving averages."""
    x, y = data(rows=64)
    layer = keras.layers.BatchNormalization(name="normal")
    model = compiled(classifier(layer))
    own = []
    last = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: own.append(layer.moving_mean.numpy())
    )
    model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[last])
    return {"own": np.array(own)}


def case_mean():
    """The mean over the ranks, weighted by their rows: 1, 2 | 6."""
    return weights(train(product(), [1.0, 2.0, 6.0], batch_size=3))


def case_parts():
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    return weights(train(product(optimizer), [1.0, 3.0, 5.0, 9.0], batch_size=2))


class Remembers(keras.optimizers.Optimizer):
    """A program's own optimizer, whose config lacks ``memory``."""

    def __init__(self, learning_rate=0.1, memory=0.5, **kwargs):
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.memory = memory

    def build(self, variables):
        super().build(variables)
        self.sums = [self.add_variable(shape=v.shape, name="sum") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        total = self.sums[self._get_variable_index(variable)]
        self.assign(total, total * self.memory + gradient)
        self.assign_sub(variable, learning_rate * total)


def case_own_optimizer():
    optimizer = Remembers(memory=0.25)
    model = train(product(optimizer), [1.0, 1.0, 1.0, 1.0], batch_size=2)
    server_models().pull_slots(optimizer)
    return {**weights(model), "sum": optimizer.sums[0].numpy()}


def case_assigned():
    """Weights and a learning rate that are assigned between two fits."""
    model = train(product(), [1.0, 1.0], batch_size=2)
    model.set_weights([np.array([5.0], "float32")])
    model.optimizer.learning_rate = 1.0
    return weights(train(model, [1.0, 1.0], batch_size=2))


def case_wrong():
    """Must be the last case: the ranks are not synchronous any more afterwards."""
    name = f"layer{RANK}"
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, name=name)])
    x, y = data()
    try:
        compiled(model, loss="mse", metrics=[]).fit(x, np.c_[y, y], verbose=0)
    except Exception as error:
        return {"error_text": np.array(f"{type(error).__name__}: {error}")}
    return {"error_text": np.array("")}


def main(path, *names):
    found: dict[str, Any] = {}
    for name, case in list(globals().items()):
        if name.startswith("case_") and (not names or name[5:] in names):
            found |= {f"{name[5:]}/{key}": value for key, value in case().items()}
    np.savez(f"{path}-{RANK}.npz", **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
