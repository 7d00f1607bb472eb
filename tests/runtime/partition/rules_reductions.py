"""Rules of reductions along dimensions."""

from __future__ import annotations

from collections.abc import Callable
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
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    SUM,
    Partial,
    Placement,
    Shard,
)
from tfcluster.runtime.partition.rules import reductions

LOGICAL = ("Any", "All")
NUMERIC = ("Sum", "Mean", "Max", "Min", "Prod", "EuclideanNorm")
BY_TERMS = {
    **dict.fromkeys(("Sum", "Mean"), SUM),
    **dict.fromkeys(("Max", "Any"), Partial("max")),
    **dict.fromkeys(("Min", "All"), Partial("min")),
}
ARGS = ("ArgMax", "ArgMin")
CUMULATIVE = ("Cumsum", "Cumprod", "CumulativeLogsumexp")


def test_every_op_has_a_case() -> None:
    known = {*LOGICAL, *NUMERIC, *ARGS, *CUMULATIVE, "L2Loss"}
    assert known == ops_of(reductions)


def _dtype(op: str, chance: Chance) -> Any:
    if op in LOGICAL:
        return np.bool_
    more = COMPLEX if op in ("Sum", "Mean", "Prod") else ()
    return chance.of((*FLOATS, *INTEGERS, *more))


def _reduction(op: str, axes: Any, keep: bool) -> Callable[..., Any]:
    reduce = raw(op, keep_dims=keep)
    return lambda values: reduce(values, tf.constant(axes, tf.int32))


@pytest.mark.parametrize("op", [*LOGICAL, *NUMERIC])
@given(seeds)
@some
def test_along_other_dimensions(op: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch((1, 3))
        keep, rank = chance.yes(), len(shape)
        others = [dim for dim in range(rank) if dim != shard.dim]
        axes = [dim for dim in others if chance.yes()]
        dropped = 0 if keep else sum(axis < shard.dim for axis in axes)
        axes = [axis - rank if chance.yes(0.3) else axis for axis in axes]
        values = chance.numbers(shape, _dtype(op, chance))
        if values.dtype in FLOATS and chance.yes(0.3):
            values = chance.spoiled(values)
        return Case(
            _reduction(op, axes, keep),
            [values],
            [shard],
            16,
            [shard.at(shard.dim - dropped)],
        )

    check(make, seed)


@pytest.mark.parametrize("op", [*LOGICAL, *NUMERIC])
@given(seeds)
@some
def test_along_the_rows(op: str, seed: int) -> None:
    """Sums, means and extremes of rows are terms; other reductions are not."""
    chance = Chance(seed)
    shape, shard = chance.batch()
    axes = [dim for dim in range(len(shape)) if dim == shard.dim or chance.yes()]
    if len(axes) == 1 and chance.yes():
        axes = [axes[0] - len(shape)]
    values = chance.numbers(shape, _dtype(op, chance))
    if values.dtype in FLOATS and chance.yes(0.3):
        values = chance.spoiled(values)
    case = Case(_reduction(op, axes, chance.yes()), [values], [shard])
    found = run(case, case.plain, chance)
    assert_close(found, 32)
    kind = values.dtype.kind
    divided = op in BY_TERMS and (op != "Mean" or kind not in "iuc")
    assert found.outputs == [BY_TERMS[op] if divided else REPLICATE]
    placement = chance.placement(values)
    assert_close(run(case, [placement], chance), 32)


@pytest.mark.parametrize("op", ["Sum", "Mean"])
@given(seeds)
@some
def test_of_terms(op: str, seed: int) -> None:
    """A linear reduction of terms is a term, if the dtype has the digits for it."""
    chance = Chance(seed)
    shape = chance.batch((1, 2))[0]
    axes = [dim for dim in range(len(shape)) if chance.yes()]
    values = chance.numbers(shape, _dtype(op, chance))
    if values.dtype in FLOATS and chance.yes(0.3):
        values = chance.spoiled(values)
    case = Case(_reduction(op, axes, chance.yes()), [values], [SUM])
    found = run(case, case.plain, chance)
    assert_close(found, 32)
    keeps = op == "Sum" or values.dtype in WIDE_FLOATS
    assert found.outputs == [SUM if keeps else REPLICATE]


@pytest.mark.parametrize("op", NUMERIC)
@given(seeds)
@few
def test_along_an_axis_that_is_not_known(op: str, seed: int) -> None:
    chance = Chance(seed)
    values = chance.numbers((chance.rows, 2))
    axis = np.array(chance.below(2), np.int32)
    for placement in (Shard(0, chance.rows), SUM):
        given_: list[Placement] = [placement, REPLICATE]
        assert_close(run(Case(raw(op), [values, axis], given_), given_, chance), 16)


def test_mean_of_an_empty_dimension() -> None:
    for op in ("Mean", "Sum", "Max", "Min"):
        chance = Chance(1)
        values = np.zeros((chance.rows, 0), np.float32)
        for axes in ([0], [1], [0, 1]):
            case = Case(_reduction(op, axes, False), [values], [Shard(0, chance.rows)])
            run(case, case.plain, chance).assert_equal()


@pytest.mark.parametrize("op", ARGS)
@given(seeds)
@some
def test_position_of_an_extreme(op: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch((1, 3))
        shape = tuple(size or 1 for size in shape)  # An empty dimension has none.
        axis = chance.of([dim for dim in range(len(shape)) if dim != shard.dim])
        target = shard.at(shard.dim - (axis < shard.dim))
        axis -= len(shape) if chance.yes(0.3) else 0
        values = chance.numbers(shape, chance.of((*FLOATS, *INTEGERS)))

        def call(values: Any) -> Any:
            kind = chance.of((tf.int32, tf.int64))
            return raw(op, output_type=kind)(values, tf.constant(axis))

        return Case(call, [values], [shard], 0, [target])

    check(make, seed)


@pytest.mark.parametrize("op", ARGS)
@given(seeds)
@few
def test_position_of_an_extreme_row(op: str, seed: int) -> None:
    chance = Chance(seed)
    values = chance.numbers((2, chance.rows))
    case = Case(lambda v: raw(op)(v, tf.constant(1)), [values], [Shard(1, chance.rows)])
    run(case, case.plain, chance).assert_equal()


@given(seeds)
@some
def test_half_of_the_sum_of_squares(seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch()
        values = chance.numbers(shape, chance.of(WIDE_FLOATS))
        return Case(raw("L2Loss"), [values], [shard], 32, [SUM])

    check(make, seed)
    chance = Chance(seed)
    half = Case(raw("L2Loss"), [chance.numbers((chance.rows, 3), np.float16)], [])
    assert_close(run(half, [Shard(0, chance.rows)], chance), 8)


@pytest.mark.parametrize("op", CUMULATIVE)
@given(seeds)
@some
def test_cumulative(op: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch((1, 2))
        axis = chance.of([dim for dim in range(len(shape)) if dim != shard.dim])
        axis -= len(shape) if chance.yes(0.3) else 0
        dtypes = WIDE_FLOATS if op == "CumulativeLogsumexp" else (*FLOATS, *INTEGERS)
        values = chance.numbers(shape, chance.of(dtypes))
        scan = raw(op, exclusive=chance.yes(), reverse=chance.yes())

        def call(values: Any) -> Any:
            return scan(values, tf.constant(axis))

        return Case(call, [values], [shard], 32, [shard])

    check(make, seed, others=2)


@pytest.mark.parametrize("op", CUMULATIVE)
@given(seeds)
@few
def test_cumulative_along_the_rows(op: str, seed: int) -> None:
    chance = Chance(seed)
    values = chance.numbers((2, chance.rows))
    case = Case(lambda v: raw(op)(v, tf.constant(-1)), [values], [])
    assert_close(run(case, [Shard(1, chance.rows)], chance), 32)
