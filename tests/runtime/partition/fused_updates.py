"""XLA compiles what a step does to large variables, and nothing else of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.runtime.partition.installed import simulated_ranks
from tfcluster.runtime.partition.fused_updates import LEAST_BYTES
from tfcluster.runtime.partition.programs import RankProgram

ROWS = 8
LARGE, SMALL = LEAST_BYTES // 4 // 16, 16
"""The widths of layers with 16 inputs, in float32."""


def trained(optimizer: Any, steps: int = 3, **options: Any) -> list[Any]:
    """The weights after some steps, from a kernel that is large and one that is not."""
    keras.utils.set_random_seed(1)
    sizes = [keras.layers.Dense(width, use_bias=False) for width in (SMALL, LARGE)]
    model = keras.Sequential([keras.Input((16,)), *sizes])
    weights = model.trainable_variables
    optimizer.build(weights)

    @tf.function(**options)  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - 1.0))
        gradients = tape.gradient(loss, [weight.value for weight in weights])
        optimizer.apply(gradients, weights)
        return loss

    x = tf.random.stateless_normal([ROWS, 16], (1, 2))
    losses = [step(x).numpy() for _ in range(steps)]
    return [np.asarray(losses), *(variable.numpy() for variable in weights)]


def compiled_ops(program: RankProgram) -> list[str]:
    """The types of the ops that XLA compiles."""
    assert program.xla is not None
    return sorted(node.op for piece in program.xla.pieces for node in piece.nodes)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "clipped": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.9),
    "averaged": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_large_updates_are_compiled(name: str, size: int) -> None:
    expected = trained(OPTIMIZERS[name]())
    with simulated_ranks(size) as hook:
        found = trained(OPTIMIZERS[name]())
    program = next(each for each in hook.programs if each.trains)
    assert program.is_divided
    ops = compiled_ops(program)
    assert sum(op.startswith("Assign") for op in ops) >= 1 + (name != "sgd")
    assert "MatMul" not in ops
    assert program.xla is not None
    for piece in program.xla.pieces:
        for node in piece.nodes:
            shape = node.attr["_output_shapes"].list.shape
            assert all(
                np.prod([d.size for d in s.dim]) * 4 >= LEAST_BYTES for s in shape
            )
    for one, whole in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, whole, rtol=0, atol=1e-5 * np.abs(whole).max())


def test_a_maximum_is_not_compiled() -> None:
    """XLA returns the number, and TensorFlow the NaN, from a NaN and a number."""
    expected = trained(keras.optimizers.Adam(0.01, amsgrad=True))
    with simulated_ranks(2) as hook:
        found = trained(keras.optimizers.Adam(0.01, amsgrad=True))
    program = next(each for each in hook.programs if each.trains)
    assert "Maximum" not in compiled_ops(program)
    for one, whole in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, whole, rtol=0, atol=1e-5 * np.abs(whole).max())


def test_what_cannot_be_compiled_is_left_without_a_word(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tfcluster.runtime.partition.tf_functions.has_xla_kernel",
        lambda node, device: node.op != "Sqrt",
    )
    expected = trained(keras.optimizers.Adam(0.01))
    with simulated_ranks(2) as hook:
        found = trained(keras.optimizers.Adam(0.01))
    program = next(each for each in hook.programs if each.trains)
    assert "Sqrt" not in compiled_ops(program)
    assert "XLA" not in capfd.readouterr().err
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)


def test_terms_of_a_sum_are_not_compiled() -> None:
    """Processes with one and with several ranks have other nodes for them."""
    large = tf.Variable(tf.ones([16, LARGE]))
    momentum = tf.Variable(tf.zeros([16, LARGE]))

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ large))
        momentum.assign(0.9 * momentum + tape.gradient(loss, large))
        large.assign_sub(0.1 * momentum)

    with simulated_ranks(2) as hook:
        step(tf.random.stateless_normal([ROWS, 16], (1, 2)))
    (program,) = hook.programs
    ops = compiled_ops(program)
    assert "AssignSubVariableOp" in ops
    assert "AddV2" not in ops
