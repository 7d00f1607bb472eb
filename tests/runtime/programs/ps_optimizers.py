"""Compares optimizers with the same updates applied by two ps tasks.

Prints a line for each optimizer: its name, then the largest difference of weights and
slots. The ps are processes that have never seen the optimizers' graphs or classes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective.transports.base import Slices
from tfcluster.runtime.context import context_from
from tfcluster.runtime.keras.strategies.optimizer_replica import (
    described,
    packer,
    traits_of,
    unique,
)
from tfcluster.runtime.parameter_server.client import ParameterServerClient, Rows
from tfcluster.runtime.tensors import tensor_of_part

STEPS = 6
SHAPES = {"table": (400, 8), "kernel": (8, 200), "bias": (200,), "scale": ()}


class Signed(keras.optimizers.Optimizer):  # type: ignore[misc] # Keras has no types
    """A user's own optimizer: it keeps the last gradient, and steps by signs."""

    def __init__(self, learning_rate: float = 0.1, **kwargs: Any) -> None:
        super().__init__(learning_rate=learning_rate, **kwargs)

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.last = [
            self.add_variable_from_reference(variable, "last") for variable in variables
        ]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        last = self.last[self._get_variable_index(variable)]
        self.assign_sub(variable, learning_rate * keras.ops.sign(gradient + last))
        self.assign(last, gradient)


def schedule() -> Any:
    return keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)


optimizers = keras.optimizers
CASES: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam with a schedule": lambda: optimizers.Adam(schedule()),
    "adamw, averages": lambda: optimizers.AdamW(
        0.1, weight_decay=0.01, use_ema=True, ema_overwrite_frequency=4
    ),
    "rmsprop, clipnorm": lambda: optimizers.RMSprop(0.1, clipnorm=0.1),
    "adagrad, clipvalue": lambda: optimizers.Adagrad(0.1, clipvalue=0.2),
    "nadam, global clipnorm": lambda: optimizers.Nadam(0.1, global_clipnorm=0.5),
    "adafactor": lambda: optimizers.Adafactor(0.1),
    "ftrl": lambda: optimizers.Ftrl(0.1),
    "lion, accumulation": lambda: optimizers.Lion(0.1, gradient_accumulation_steps=2),
    "a user's own": lambda: Signed(0.1),
}
SPARSE = ("sgd", "momentum", "adam with a schedule", "adagrad, clipvalue")


def variables() -> list[Any]:
    rng = np.random.default_rng(0)
    return [
        keras.Variable(rng.normal(size=shape).astype("float32"), name=name)
        for name, shape in SHAPES.items()
    ]


def gradients(rng: Any, *, sparse: bool) -> list[Any]:
    found: list[Any] = [rng.normal(size=s).astype("float32") for s in SHAPES.values()]
    if sparse:
        rows = np.array([7, 300, 7, 399], np.int64)
        found[0] = Slices(rng.normal(size=(4, 8)).astype("float32"), rows)
    return found


def of_tensorflow(gradient: Any) -> Any:
    if not isinstance(gradient, Slices):
        return tf.constant(gradient)
    shape = tf.constant(SHAPES["table"], tf.int64)
    return tf.IndexedSlices(gradient.values, gradient.indices, shape)


def apart(one: Any, other: Any) -> float:
    """The largest difference, relative to the largest value if that exceeds 1."""
    one, other = np.asarray(one, float), np.asarray(other, float)
    most = np.max(np.abs(one), initial=1.0)
    return float(np.max(np.abs(one - other), initial=0.0) / most)


def farthest(
    servers: ParameterServerClient, name: str, make: Callable[[], Any]
) -> float:
    local, ours, theirs = make(), variables(), variables()
    served = type(local).from_config(local.get_config())
    local.build(ours)
    served.build(theirs)
    traits = traits_of(served, clips_here=False)
    sparse = name in SPARSE
    opened = servers.open(
        name,
        described(theirs, rows_only=traits.rows_only),
        [np.asarray(variable.numpy()) for variable in theirs],
        "sddd" if sparse else "dddd",
        packer(served, clips_here=False),
        splittable=traits.splittable,
        together=traits.together,
    )
    assert opened.defined
    rng = np.random.default_rng(1)
    for step in range(STEPS):
        given = gradients(rng, sparse=sparse)
        # A variable may lack a gradient in one step.
        if step == STEPS - 2:
            given[2] = None
        local.apply([None if g is None else of_tensorflow(g) for g in given], ours)
        for variable, new in zip(theirs, servers.push(name, given), strict=True):
            if isinstance(new, Rows):
                rows = tf.IndexedSlices(new.values, new.indices)
                variable.value.scatter_update(rows)
            elif new is not None:
                variable.value.assign(tensor_of_part(new))
    found = [apart(a.numpy(), b.numpy()) for a, b in zip(ours, theirs, strict=True)]
    slots = servers.slots(name)
    paths = unique(served.variables)
    assert set(slots) >= set(paths), (sorted(paths), sorted(slots))
    found += [
        apart(slots[path], variable.numpy())
        for path, variable in zip(paths, local.variables, strict=True)
    ]
    return max(found)


context = context_from(os.environ)
servers = ParameterServerClient(
    context.parameter_servers, rank=context.rank, size=context.size, token=context.token
)
for name, make in CASES.items():
    try:
        print(f"{name}: {farthest(servers, name, make):.3g}", flush=True)
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}", flush=True)
servers.close()
