"""Checks that all ops that Keras traces have a rule, or a reason to be computed whole.

Each test prints the ops that it found and how they are computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.runtime.partition import keras_losses, keras_ops, keras_optimizers
from tests.runtime.partition.traced_ops import (
    Coverage,
    energy,
    gradients,
    public,
    tensors,
)
from tfcluster.base.versions import NEWEST, numbers
from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.rules.all import RULES, WHOLE

# Keras warns of some of the arguments.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_functions() -> None:
    coverage = Coverage()
    for name in public(keras.ops):
        if name in keras_ops.WITHOUT_CASE:
            continue
        cases = keras_ops.cases(name)
        if not cases:
            coverage.failures.append(f"keras.ops.{name} has no case")
        for function, specs in cases:
            coverage.trace(name, *_with_gradient(function), specs=specs)
    coverage.check()


def _with_gradient(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    def forward(*inputs: Any) -> Any:
        return tensors(function(*inputs))

    def step(*inputs: Any) -> Any:
        sources = [each for each in inputs if each.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            outputs = forward(*inputs)
            loss = energy(outputs)
        return outputs if loss is None else [outputs, gradients(tape, loss, sources)]

    return [step, forward]


def test_losses() -> None:
    coverage = Coverage()
    for name in public(keras.losses):
        if name in keras_losses.WITHOUT_CASE:
            continue
        found = getattr(keras.losses, name)
        function: Any = found() if inspect.isclass(found) else found
        specs = keras_losses.specs(name)
        coverage.trace(name, *_with_gradient(function), specs=specs)
        if inspect.isclass(found):
            mask = tf.TensorSpec((None,), "float32")

            def weighted(
                true: Any, given: Any, weight: Any, loss: Any = function
            ) -> Any:
                return loss(true, given, sample_weight=weight)

            coverage.trace(name, *_with_gradient(weighted), specs=[*specs, mask])
    coverage.check()


def test_metrics() -> None:
    coverage = Coverage()
    for name in public(keras.metrics):
        if name in keras_losses.METRICS_WITHOUT_CASE:
            continue
        found = getattr(keras.metrics, name)
        specs = keras_losses.specs(name)
        if not inspect.isclass(found):
            coverage.trace(name, found, specs=specs)
            continue
        for arguments in keras_losses.metric_arguments(name):
            coverage.trace(name, _metric_step(found(**arguments)), specs=specs)
    coverage.check()


def _metric_step(metric: Any) -> Callable[..., Any]:
    def step(*inputs: Any) -> Any:
        metric.update_state(*inputs)
        result = metric.result()
        metric.reset_state()
        return result

    return step


def test_optimizers() -> None:
    assert not set(public(keras.optimizers)) - {
        *keras_optimizers.NAMES,
        *keras_optimizers.WITHOUT_CASE,
    }
    coverage = Coverage()
    for name, make in keras_optimizers.cases():
        coverage.trace(
            name,
            keras_optimizers.step(make()),
            specs=[tf.TensorSpec((None, 5), "int32")],
        )
    coverage.check()


def test_all_names_are_those_of_ops() -> None:
    if numbers(tf.__version__) >= NEWEST["tensorflow"]:
        # Older versions lack some.
        assert not [op for op in (*RULES, *WHOLE) if tf_functions.op_def(op) is None]
    assert not set(RULES) & set(WHOLE)
