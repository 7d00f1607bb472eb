"""Functions that XLA is to compile: divided, the pieces between exchanges are."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.runtime.partition.installed import simulated_ranks
from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.functions import MUST_COMPILE, all_nodes, parsed
from tfcluster.runtime.partition.programs import RankProgram

layers = keras.layers


def between(program: RankProgram) -> list[str]:
    """The types of the ops that no piece holds, in the order of the program."""
    assert program.written is not None
    nodes = program.written.definitions[0].node_def
    return [node.op for node in nodes if node.op != "Const"]


def calls(program: RankProgram) -> list[Any]:
    """The calls of pieces in a program."""
    assert program.written is not None
    function = parsed(program.written.definitions[0])
    return [node for node in all_nodes(function) if MUST_COMPILE in node.attr]


def rows() -> Any:
    return tf.constant(np.random.default_rng(1).normal(size=(12, 5)))


@pytest.mark.parametrize(
    ("size", "call", "outer", "inner"),
    [
        *((2, False, False, False), (2, False, False, True), (2, False, True, False)),
        *((3, True, False, True), (3, True, True, False), (3, True, True, True)),
    ],
)
def test_pieces_of_a_function_are_compiled(
    size: int, call: bool, outer: bool, inner: bool
) -> None:
    def centered(x: Any) -> Any:
        return x - tf.reduce_mean(tf.linalg.matmul(x, tf.transpose(x)) @ x, 0)

    called = tf.function(centered, jit_compile=inner or None)

    def step(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(w)
            loss = tf.reduce_mean(tf.tanh(tf.linalg.matvec(called(x), w)) ** 2)
        return loss, tape.gradient(loss, w)

    compiled = tf.function(step, jit_compile=outer or None)
    w = tf.constant(np.linspace(-1.0, 1.0, 5))
    expected = compiled(rows(), w)
    with simulated_ranks(size, call=call) as hook:
        found = compiled(rows(), w)
    (program,) = hook.programs
    assert program.is_divided
    assert bool(calls(program)) == (outer or inner)
    if outer and not call:
        assert between(program) == ["PartitionedCall"]
    for one, whole in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.numpy(), whole.numpy(), 1e-11)


DRAWS = {
    "uniform": tf.random.stateless_uniform,
    "normal": tf.random.stateless_normal,
    "truncated": tf.random.stateless_truncated_normal,
}


@pytest.mark.parametrize("dtype", [tf.float16, tf.float32, tf.float64])
@pytest.mark.parametrize("name", DRAWS)
def test_xla_draws_the_numbers_of_one_machine(name: str, dtype: tf.DType) -> None:
    def noisy(x: Any) -> Any:
        drawn = DRAWS[name](tf.shape(x), (3, 5), dtype=dtype)
        return tf.reduce_sum(tf.cast(drawn, x.dtype) * x, 0)

    expected = tf.function(noisy, jit_compile=True)(rows())
    with simulated_ranks(3) as hook:
        found = tf.function(noisy, jit_compile=True)(rows())
    (program,) = hook.programs
    assert program.is_divided
    assert calls(program)
    np.testing.assert_allclose(found.numpy(), expected.numpy(), 1e-10)


def test_what_follows_from_a_draw_of_xla_is_not_known_before() -> None:
    def shuffled(x: Any) -> Any:
        drawn = tf.random.stateless_uniform([5], (3, 5), 0, 100, tf.int32)
        kept = tf.random.stateless_uniform([5], (2, 1)) < 0.5
        columns = tf.where(kept, drawn % 5, 0) + tf.cast(kept, tf.int32)
        return tf.reduce_sum(tf.gather(x, columns % 5, axis=1), 0)

    expected = tf.function(shuffled, jit_compile=True)(rows())
    with simulated_ranks(2) as hook:
        found = tf.function(shuffled, jit_compile=True)(rows())
    (program,) = hook.programs
    assert program.is_divided
    np.testing.assert_allclose(found.numpy(), expected.numpy(), 1e-10)


def test_sums_over_what_was_broadcast_are_compiled(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Gradients sum over dimensions whose number is known once sizes are."""
    layer = keras.layers.LayerNormalization(dtype="float64")
    layer.build((None, 5))

    def gradients(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(layer(x) ** 3)
        return tape.gradient(loss, layer.trainable_variables)

    batches = [tf.TensorSpec([None, 5], "float64")]
    step = tf.function(gradients, jit_compile=True, input_signature=batches)
    expected = step(rows())
    with simulated_ranks(2):
        found = step(rows())
    assert "without XLA" not in capfd.readouterr().err
    for one, whole in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.numpy(), whole.numpy(), 1e-11)


def test_draws_that_xla_does_not_compile_are_said_to_differ(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def noisy(x: Any) -> Any:
        drawn = tf.random.stateless_poisson(tf.shape(x), (1, 2), 2.0, x.dtype)
        return tf.reduce_sum(drawn * x, 0)

    with simulated_ranks(2):
        tf.function(noisy, jit_compile=True)(rows())
    assert "numbers it draws are not those of XLA" in capfd.readouterr().err


def test_a_compiled_function_without_exchanges_stays_compiled() -> None:
    product = tf.function(lambda x: tf.linalg.matmul(x, x) + 1.0, jit_compile=True)
    small = tf.constant(np.eye(1))  # Has no rows to divide.
    expected = product(small)
    with simulated_ranks(2) as hook:
        np.testing.assert_array_equal(product(small).numpy(), expected.numpy())
    (program,) = hook.programs
    assert not program.is_divided
    definition = tf_functions.definition_of(program.name)
    assert definition is not None
    assert MUST_COMPILE in definition.attr


def test_what_xla_cannot_compile_runs_between_the_pieces(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def step(x: Any, w: Any) -> Any:
        hidden = tf.linalg.matmul(x, w)
        text = tf.strings.as_string(tf.reduce_sum(hidden, 0))
        back = tf.strings.to_number(text, tf.float64)
        return tf.reduce_mean(tf.linalg.matmul(hidden - back, w), 0)

    w = tf.constant(np.eye(5) + 0.5)
    expected = step(rows(), w)
    with simulated_ranks(2, call=True) as hook:
        found = tf.function(step, jit_compile=True)(rows(), w)
    (program,) = hook.programs
    assert len(calls(program)) == 2
    assert {"AsString", "StringToNumber"} <= set(between(program))
    np.testing.assert_allclose(found.numpy(), expected.numpy(), 1e-11)
    errors = capfd.readouterr().err
    assert errors.count("without XLA") == 1
    assert "AsString" in errors
    assert "compiled_functions.py" in errors


def test_a_piece_that_xla_rejects_runs_without_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lower = tf_functions.lower_by_xla

    def reject(name: str, *more: Any) -> None:
        if "rejected" in name:
            raise tf.errors.UnimplementedError(None, None, "too large {{node MatMul}}")
        lower(name, *more)

    def rejected(x: Any, w: Any) -> Any:
        return tf.reduce_mean(tf.linalg.matmul(x, w), 0)

    monkeypatch.setattr(tf_functions, "lower_by_xla", reject)
    w = tf.constant(np.eye(5) + 0.5)
    expected = rejected(rows(), w)
    with simulated_ranks(2, call=True) as hook:
        found = tf.function(rejected, jit_compile=True)(rows(), w)
    (program,) = hook.programs
    assert not calls(program)
    np.testing.assert_allclose(found.numpy(), expected.numpy(), 1e-11)
    errors = capfd.readouterr().err
    assert errors.count("without XLA") == 1
    assert "MatMul" in errors
    assert "too large" in errors
