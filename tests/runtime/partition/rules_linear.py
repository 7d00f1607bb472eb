"""Rules of linear ops, which compute terms of a sum from terms of a sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given

from tests.runtime.partition.rule_checks import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    WIDE_FLOATS,
    Array,
    Case,
    Chance,
    assert_close,
    check,
    few,
    ops_of,
    raw,
    run,
    seeds,
    some,
)
from tests.runtime.partition.simulated import divide
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    SUM,
    Partial,
    Placement,
    Shard,
)
from tfcluster.runtime.partition.rules import linear

COPIES = ("Identity", "StopGradient", "PreventGradient", "Snapshot")
CHECKS = ("CheckNumerics", "CheckNumericsV2")
SUMS = ("Add", "AddV2", "Sub", "AddN")
QUOTIENTS = ("RealDiv", "DivNoNan", "Div")
PARTS = ("Real", "Imag", "Conj")


def test_every_op_has_a_case() -> None:
    others = {
        "IdentityN",
        "EnsureShape",
        "Neg",
        "Cast",
        "Mul",
        "PlaceholderWithDefault",
    }
    assert {*COPIES, *CHECKS, *SUMS, *QUOTIENTS, *PARTS, *others} == ops_of(linear)


def _any_dtype(chance: Chance) -> Any:
    return chance.of((*FLOATS, *INTEGERS, *COMPLEX))


@pytest.mark.parametrize("op", [*COPIES, "Neg"])
@given(seeds)
@few
def test_of_one_input(op: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch()
        return Case(
            raw(op), [chance.numbers(shape, _any_dtype(chance))], [shard], 0, [shard]
        )

    check(make, seed)


@pytest.mark.parametrize("op", PARTS)
@given(seeds)
@few
def test_of_a_complex_input(op: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch()
        attributes = {} if op == "Conj" else {"Tout": tf.float32}
        values = chance.numbers(shape, np.complex64)
        return Case(raw(op, **attributes), [values], [shard], 0, [shard])

    check(make, seed)


@pytest.mark.parametrize("op", [*COPIES, "Neg", "Conj"])
@given(seeds)
@few
def test_terms_stay_terms(op: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        dtype = np.complex64 if op == "Conj" else _any_dtype(chance)
        values = chance.numbers(chance.batch()[0], dtype)
        return Case(raw(op), [values], [SUM], 0, [SUM])

    check(make, seed)


@given(seeds)
@few
def test_placeholder(seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch()
        call = raw("PlaceholderWithDefault", shape=shape)
        return Case(call, [chance.numbers(shape)], [shard], 0, [shard])

    check(make, seed)


@given(seeds)
@some
def test_copies_of_several(seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch()
        inputs = [chance.numbers(shape), chance.numbers((2,)), chance.numbers((3,))]
        placements: list[Placement] = [shard, SUM, REPLICATE]

        def call(*values: Any) -> Any:
            return tf.raw_ops.IdentityN(input=values)

        return Case(call, inputs, placements, 0, placements)

    check(make, seed)


@pytest.mark.parametrize("op", CHECKS)
@given(seeds)
@few
def test_check_of_numbers(op: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch()
        values = chance.numbers(shape, chance.of(FLOATS))
        return Case(raw(op, message="wrong"), [values], [shard], 0, [shard])

    check(make, seed)


@pytest.mark.parametrize("op", CHECKS)
@given(seeds)
@few
def test_check_of_numbers_finds_one_that_is_none(op: str, seed: int) -> None:
    chance = Chance(seed)
    values = chance.numbers((chance.rows, 2))
    values[chance.below(chance.rows), 1] = np.nan
    for placement in (Shard(0, chance.rows), SUM):
        case = Case(raw(op, message="wrong"), [values], [placement])
        with pytest.raises(tf.errors.InvalidArgumentError, match="wrong"):
            run(case, [placement], chance, compare=False)


@pytest.mark.parametrize("op", CHECKS)
@given(seeds)
@few
def test_check_of_a_sum_that_is_infinite(op: str, seed: int) -> None:
    """Its terms are finite, so that only the sum can be checked."""
    rows = max(Chance(seed).size, 2)
    terms = np.full((rows, 2), 2e38, np.float32)  # One for each rank.

    def function(rows: Any) -> Any:
        return raw(op, message="wrong")(tf.reduce_sum(rows, 0))

    with pytest.raises(tf.errors.InvalidArgumentError, match="wrong"):
        divide(function, [terms], [Shard(0, rows)], rows, rows, compare=False)


def _of_unknown_width(indices: Any, depth: Any) -> Any:
    return tf.one_hot(indices, tf.math.bincount(depth)[0])


@given(seeds)
@some
def test_check_of_a_shape(seed: int) -> None:
    """The rows are known; that the other size is right is only known at run time."""
    chance = Chance(seed)
    rows = chance.rows
    inputs = [chance.numbers((rows,), np.int32, 0, 2), np.array([0, 1, 0], np.int32)]
    placements: list[Placement] = [Shard(0, rows), REPLICATE]

    def ensured(shape: Sequence[int | None]) -> Callable[..., Any]:
        return lambda *given: tf.ensure_shape(_of_unknown_width(*given), shape)

    for shape in ([rows, 2], [None, 2], [rows, None]):
        found = divide(ensured(shape), inputs, placements, chance.size, rows)
        found.assert_equal()
        assert not found.computed_whole
        assert found.outputs == [Shard(0, rows)]
    with pytest.raises(tf.errors.InvalidArgumentError):
        divide(ensured([rows, 3]), inputs, placements, chance.size, rows, False)


@given(seeds)
@some
def test_cast(seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch()
        source, target = (
            chance.of((*FLOATS, *INTEGERS, np.bool_, np.complex64)) for _ in range(2)
        )
        values = chance.numbers(shape, source)
        if source == np.complex64:
            target = np.complex128
        call = raw("Cast", DstT=tf.as_dtype(target))
        return Case(call, [values], [shard], 0, [shard])

    check(make, seed, others=3)


@pytest.mark.parametrize("target", [*FLOATS, np.int32, np.bool_])
@pytest.mark.parametrize("source", [*FLOATS, np.int32])
@given(seeds)
@few
def test_cast_of_terms(source: Any, target: Any, seed: int) -> None:
    """Only to a dtype that holds the terms exactly do they stay terms."""
    chance = Chance(seed)
    values = chance.numbers((3, 2), source)
    case = Case(raw("Cast", DstT=tf.as_dtype(target)), [values], [SUM])
    found = run(case, case.plain, chance)
    found.assert_equal()
    wider = np.dtype(target).itemsize >= np.dtype(source).itemsize
    keeps = target in WIDE_FLOATS and source in FLOATS and wider
    keeps = keeps and source != np.float16  # Its sum may overflow.
    assert found.outputs == [SUM if keeps else REPLICATE]


@pytest.mark.parametrize("op", SUMS)
@given(seeds)
@some
def test_sums(op: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch()
        dtype = _any_dtype(chance)
        count = 1 + chance.below(3) if op == "AddN" else 2
        inputs = [chance.numbers(shape, dtype) for _ in range(count)]
        plain: list[Placement] = [shard] * count
        if op != "AddN" and shard.dim > 0 and chance.yes():
            inputs[1], plain[1] = inputs[1][0] if shape[0] else inputs[1], shard
            if shape[0]:
                plain[1] = shard.at(shard.dim - 1)
        return Case(_of_list(op), inputs, plain, 0, [shard])

    check(make, seed, others=2)


def _of_list(op: str) -> Callable[..., Any]:
    if op == "AddN":
        return lambda *inputs: tf.raw_ops.AddN(inputs=inputs)
    return raw(op)


@pytest.mark.parametrize("op", SUMS)
@given(seeds)
@few
def test_sums_of_terms_are_terms(op: str, seed: int) -> None:
    """A whole tensor is added once."""

    def make(chance: Chance) -> Case:
        shape, dtype = chance.batch()[0], _any_dtype(chance)
        inputs = [chance.numbers(shape, dtype) for _ in range(2)]
        plain = chance.of(([SUM, SUM], [SUM, REPLICATE], [REPLICATE, SUM]))
        return Case(_of_list(op), inputs, plain, 8, [SUM])

    check(make, seed)


@pytest.mark.parametrize("op", ["Add", "AddV2", "Sub"])
@given(seeds)
@few
def test_terms_that_are_broadcast_are_added_up_first(op: str, seed: int) -> None:
    chance = Chance(seed)
    inputs = [chance.numbers((3,)), chance.numbers((2, 3))]
    placements = chance.of(([SUM, SUM], [SUM, REPLICATE], [REPLICATE, SUM]))
    assert_close(run(Case(raw(op), inputs, placements), placements, chance), 8)


@pytest.mark.parametrize("op", ["Mul", *QUOTIENTS])
@given(seeds)
@some
def test_products_and_quotients(op: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch()
        dtype = chance.of(FLOATS)
        inputs = [chance.numbers(shape, dtype), chance.numbers(shape, dtype)]
        if chance.yes(0.3):
            inputs = [chance.spoiled(each) for each in inputs]
        plain: list[Placement] = [shard, shard]
        if chance.yes():
            inputs[1], plain[1] = chance.numbers((), dtype), REPLICATE
        return Case(raw(op), inputs, plain, 0, [shard])

    check(make, seed, others=3)


def _by_constant(op: str, factor: Array) -> Callable[..., Any]:
    return lambda values: raw(op)(values, tf.constant(factor))


@pytest.mark.parametrize("op", ["Mul", *QUOTIENTS])
@given(seeds)
@few
def test_terms_times_a_constant_are_terms(op: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        dtype = chance.of(WIDE_FLOATS)
        values = chance.numbers((2, 3), dtype)
        if chance.yes():
            values = chance.spoiled(values)
        factor = chance.numbers(chance.of(((), (3,), (2, 3), (2, 1))), dtype, 1, 2)
        return Case(_by_constant(op, factor), [values], [SUM], 8, [SUM])

    check(make, seed)


@pytest.mark.parametrize("factor", [0.0, np.inf, -np.inf, np.nan, 1e-40])
@pytest.mark.parametrize("op", ["Mul", *QUOTIENTS])
@given(seeds)
@few
def test_terms_are_added_up_before_a_factor_that_is_not_finite(
    op: str, factor: float, seed: int
) -> None:
    """A term may be zero where the sum is not, and 0 * inf is no number."""
    chance = Chance(seed)
    values, scale = chance.numbers((4,)), np.array(factor, np.float32)
    for case in (
        Case(_by_constant(op, scale), [values], [SUM]),
        Case(raw(op), [values, scale], [SUM, REPLICATE]),
        Case(lambda a, b: raw(op)(b, a), [scale, values], [REPLICATE, SUM]),
    ):
        run(case, case.plain, chance).assert_equal()


@given(seeds)
@some
def test_products_of_terms(seed: int) -> None:
    """Only sums of terms are terms of a sum."""
    chance = Chance(seed)
    inputs = [chance.numbers((2, 3)) for _ in range(2)]
    placements = [chance.of((SUM, Partial("max"), Partial("min"))) for _ in range(2)]
    for op in ("Mul", "RealDiv", "Sub"):
        assert_close(run(Case(raw(op), inputs, placements), placements, chance), 8)


def exchanged(function: Callable[..., Any]) -> list[int]:
    """How many tensors each exchange carries, for a function of rows."""
    rows = np.linspace(-1.0, 1.0, 18).reshape(6, 3)
    found = divide(function, [rows], [Shard(0, 6)], size=2)
    found.assert_equal(1e-12)
    return [len(values) for values in found.written.exchanged]


def test_terms_go_into_the_exchange_for_which_their_sum_would_wait() -> None:
    def added(x: Any) -> Any:
        return tf.reduce_sum(x, 0) + tf.tanh(tf.reduce_sum(x * x, 0))

    assert exchanged(added) == [2]


def test_terms_are_added_up_before_an_exchange_that_nothing_waits_for() -> None:
    def added(x: Any) -> Any:
        return tf.reduce_sum(x, 0) + tf.reduce_sum(x * x, 0) + tf.ones(3, x.dtype)

    assert exchanged(added) == [1]


def test_copies_of_terms_are_exchanged_once() -> None:
    def copied(x: Any) -> Any:
        mean = tf.reduce_mean(x, 0, keepdims=True)
        return tf.tanh(tf.stop_gradient(mean)), tf.exp(-tf.squeeze(mean, 0))

    assert exchanged(copied) == [1]
