"""Checks that all ops that the layers of Keras trace are known to the rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.runtime.partition import keras_layers
from tests.runtime.partition.traced_ops import Coverage, energy, gradients, public

# Keras warns of some of the arguments.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_layers() -> None:
    names = public(keras.layers)
    cases = {*keras_layers.CASES}
    assert not {*names} - {*cases, *keras_layers.WITHOUT_CASE}
    lacking = {name for name in cases if not hasattr(keras.layers, name)}
    coverage = Coverage()
    for name in sorted(cases & {*names} | lacking):
        for make, inputs in keras_layers.CASES[name]:
            layer = coverage.made(name, make)
            if layer is None:
                continue
            modes = [True, False] if keras_layers.tells_training(layer) else [False]
            for training in modes:
                step, forward = _layer_step(layer, training)
                specs = keras_layers.specs(inputs)
                functions = [step, forward] if training == modes[0] else [forward]
                coverage.trace(name, *functions, specs=specs)
    coverage.check()


def _layer_step(
    layer: Any, training: bool
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def forward(*inputs: Any) -> Any:
        return keras_layers.call(layer, list(inputs), training)

    def step(*inputs: Any) -> Any:
        sources = [each for each in inputs if each.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            output = forward(*inputs)
            loss = energy([*tf.nest.flatten(output), *layer.losses])
        if loss is None:
            return output
        sources += [each.value for each in layer.trainable_variables]
        return output, gradients(tape, loss, sources)

    return step, forward
