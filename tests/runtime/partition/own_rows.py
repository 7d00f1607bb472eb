"""Ranks that train on their own rows: what they take for the tensors of all rows."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.runtime.partition.installed import installed
from tfcluster.runtime.partition.hook import Hook
from tfcluster.runtime.partition.own_rows import changes
from tfcluster.runtime.partition.placement import Ranks
from tfcluster.runtime.partition.programs import RankProgram
from tfcluster.runtime.partition.tf_functions import living_variables
from tfcluster.runtime.partition.variables import Watched
from tfcluster.runtime.tensor_types import Array, Tensor

ROWS, SIZE = 7, 2
X = np.random.default_rng(5).normal(size=(ROWS, 3)).astype(np.float32)
OWN = (slice(0, 3), slice(3, 7))


class Noted:
    """Notes the programs that train, and the variables that they change."""

    def __init__(self) -> None:
        self.programs: list[RankProgram] = []
        self.changed: dict[str, str] = {}
        self.ends = 0

    def begins(
        self,
        program: RankProgram,
        inputs: Callable[[], Sequence[Watched]],
        variables: Callable[[], Sequence[Any]],
    ) -> None:
        self.programs.append(program)
        assert program.placed is not None
        kinds = changes(program.placed)
        own = {id(each.handle): each.name for each in variables()}
        self.changed = {
            own[id(each.handle)]: str(kinds[each.place])
            for each in inputs()
            if each.place in kinds
        }

    def ended(self) -> None:
        self.ends += 1


def on_rank(rank: int, run: Callable[[Tensor], Any]) -> tuple[Any, Noted]:
    noted = Noted()
    hook = Hook(Ranks(SIZE, (rank,)), strict=True, alone=noted)
    with installed(hook):
        return run(tf.constant(X)), noted


def gradient_of(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Array]:
    """A function that trains: it returns the gradient of a loss."""
    weight = tf.Variable([[0.5], [1.0], [-2.0]], name="weight")

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Tensor) -> Any:
        with tf.GradientTape() as tape:
            value = loss(x, x @ weight)
        return tape.gradient(value, weight)

    def run(x: Tensor) -> Array:
        return np.asarray(step(x))

    return run


@pytest.mark.parametrize("rank", range(SIZE))
def test_a_mean_is_that_of_own_rows(rank: int) -> None:
    found, noted = on_rank(rank, gradient_of(lambda x, y: tf.reduce_mean(y)))
    np.testing.assert_allclose(found[:, 0], X[OWN[rank]].mean(0), rtol=1e-5)
    assert [each.on_own_rows for each in noted.programs] == [True]
    assert noted.ends == 1


@pytest.mark.parametrize("rank", range(SIZE))
def test_a_sum_is_scaled_to_all_rows(rank: int) -> None:
    found, _ = on_rank(rank, gradient_of(lambda x, y: tf.reduce_sum(y)))
    np.testing.assert_allclose(found[:, 0], X[OWN[rank]].mean(0) * ROWS, rtol=1e-5)


@pytest.mark.parametrize("rank", range(SIZE))
def test_a_term_without_rows_counts_once(rank: int) -> None:
    constant = np.full((3, 1), 2.0, np.float32)
    weight = tf.Variable(constant)

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Tensor) -> Any:
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(x @ weight) + tf.reduce_sum(weight**2)
        return tape.gradient(value, weight)

    found, _ = on_rank(rank, lambda x: np.asarray(step(x)))
    expected = X[OWN[rank]].mean(0)[:, None] + 2 * constant
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("rank", range(SIZE))
def test_rows_are_repeated(rank: int) -> None:
    weight = tf.Variable(1.0)

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with tf.GradientTape() as tape:
            scaled = x * weight
            loss = tf.reduce_mean(scaled)
        positive = tf.reduce_sum(tf.cast(x[:, 0] > -100.0, tf.int32))
        return scaled, tape.gradient(loss, weight), positive

    (scaled, _, count), _ = on_rank(rank, step)
    rows = X[OWN[rank]]
    places = (np.arange(ROWS) - OWN[rank].start) % len(rows)
    np.testing.assert_allclose(scaled, rows[places], rtol=1e-6)
    np.testing.assert_allclose(scaled[OWN[rank]], rows, rtol=1e-6)
    assert int(count) == ROWS


def test_variables_that_change_are_known() -> None:
    names = ("weight", "frozen", "seen", "largest", "state")
    initial = (1.0, 2.0, 0.0, 0.0, [0.0] * ROWS)
    weight, frozen, seen, largest, state = (
        tf.Variable(value, name=name)
        for value, name in zip(initial, names, strict=True)
    )

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * weight * frozen)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        largest.assign(tf.maximum(largest, tf.reduce_max(x)))
        state.assign(state + x[:, 0])
        if loss > 0:
            seen.assign(seen + loss)

    _, noted = on_rank(0, step)
    kinds = {"weight:0": "R", "seen:0": "R", "largest:0": "P(max)", "state:0": "S(0)"}
    assert noted.changed == kinds


def test_a_variable_that_is_gone_is_no_error() -> None:
    held = {"kept": tf.Variable(1.0), "gone": tf.Variable(2.0)}

    @tf.function  # type: ignore[untyped-decorator]
    def function() -> Any:
        return held["kept"] + held["gone"]

    traced = function.get_concrete_function()
    assert len(living_variables(traced)) == 2
    handle = held.pop("gone").handle
    gc.collect()
    assert [id(each) for each in living_variables(traced)] == [id(held["kept"])]
    assert handle is not None
