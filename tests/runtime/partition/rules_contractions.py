"""Rules of products that sum over a common dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given

from tests.runtime.partition.rule_checks import (
    FLOATS,
    INTEGERS,
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
from tfcluster.runtime.partition.rules import contractions

BATCHED = ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
ULPS = 32


def test_every_op_has_a_case() -> None:
    assert {"MatMul", *BATCHED, "Einsum"} == ops_of(contractions)


def _dtype(chance: Chance) -> Any:
    return chance.of((*FLOATS, *INTEGERS, np.complex64))


def _sides(chance: Chance, first: Shard | None, label: str) -> dict[str, int]:
    """Sizes of the dimensions m, n and k; those of the rows have the name ``label``."""
    sizes = dict(zip("mnk", chance.dims(3, (1, 2, 3)), strict=True))
    if first is not None:
        sizes[label] = first.size
    return sizes


@pytest.mark.parametrize("label", ["m", "n", "k"])
@given(seeds)
@some
def test_matmul(label: str, seed: int) -> None:
    """Along m and n the result has the rows; along k there are terms."""

    def make(chance: Chance) -> Case:
        rows = chance.shard(0)
        sizes = _sides(chance, rows, label)
        transposed = chance.yes(), chance.yes()
        names = ["km" if transposed[0] else "mk", "nk" if transposed[1] else "kn"]
        dtype = _dtype(chance)
        inputs = [chance.numbers([sizes[c] for c in each], dtype) for each in names]
        plain: list[Placement] = [
            rows.at(each.index(label)) if label in each else REPLICATE for each in names
        ]
        call = raw("MatMul", transpose_a=transposed[0], transpose_b=transposed[1])
        target = SUM if label == "k" else rows.at("mn".index(label))
        return Case(call, inputs, plain, ULPS, [target])

    check(make, seed, others=3)


@pytest.mark.parametrize("label", ["batch", "m", "n", "k"])
@pytest.mark.parametrize("op", BATCHED)
@given(seeds)
@few
def test_batch_matmul(op: str, label: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        rows = chance.shard(0)
        sizes = _sides(chance, None if label == "batch" else rows, label)
        outer = [*chance.dims(chance.below(3))]
        place = chance.below(len(outer) + 1)
        if label == "batch":
            outer.insert(place, rows.size)
        adjoint = chance.yes(), chance.yes()
        names = ["km" if adjoint[0] else "mk", "nk" if adjoint[1] else "kn"]
        dtype = _dtype(chance)
        if op == "BatchMatMulV3" and dtype == np.float16:
            dtype = np.float32  # It has no kernel for the other.
        inputs, plain = [], []
        has_rows = chance.below(2)
        for index, each in enumerate(names):
            # The first op does not broadcast.
            keep = op == "BatchMatMul"
            own = [size if keep or chance.yes(0.7) else 1 for size in outer]
            if label == "batch" and index == has_rows:
                own[place] = rows.size
            inputs.append(chance.numbers([*own, *(sizes[c] for c in each)], dtype))
            placement: Placement = REPLICATE
            if label in each:
                placement = rows.at(len(own) + each.index(label))
            elif label == "batch" and own[place] == rows.size:
                placement = rows.at(place)
            plain.append(placement)
        more = {"Tout": tf.as_dtype(dtype)} if op == "BatchMatMulV3" else {}
        call = raw(op, adj_x=adjoint[0], adj_y=adjoint[1], **more)
        target: Placement = SUM
        if label != "k":
            dim = place if label == "batch" else len(outer) + "mn".index(label)
            target = rows.at(dim)
        return Case(call, inputs, plain, ULPS, [target])

    check(make, seed, others=2)


def _einsum(equation: str) -> Callable[..., Any]:
    return lambda *inputs: tf.raw_ops.Einsum(inputs=inputs, equation=equation)


EINSUMS = (
    *("ij,jk->ik", "bij,bjk->bik", "bij,jk->bik", "bij,bj->bi", "bqhd,bkhd->bhqk"),
    *("bhqk,bkhd->bqhd", "i,j->ij", "bi,bi->b", "bi,bi->", "abc,cd->dab", "ij->ji"),
    *("bij->bi", "bij->j", "ab->"),
)


@pytest.mark.parametrize("equation", EINSUMS)
@given(seeds)
@few
def test_einsum(equation: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        names = equation.partition("->")[0].split(",")
        output = equation.partition("->")[2]
        # A label of one input only that is summed over is tested below.
        labels = [
            label
            for label in sorted({*"".join(names)})
            if label in output or all(label in each for each in names)
        ]
        rows, label = chance.shard(0), chance.of(labels)
        sizes = {each: chance.of((1, 2, 3)) for each in "".join(names)}
        sizes[label] = rows.size
        dtype = chance.of(FLOATS)
        inputs = [chance.numbers([sizes[c] for c in each], dtype) for each in names]
        plain: list[Placement] = [
            rows.at(each.index(label)) if label in each else REPLICATE for each in names
        ]
        target = rows.at(output.index(label)) if label in output else SUM
        return Case(_einsum(equation), inputs, plain, ULPS, [target])

    check(make, seed, others=2)


@pytest.mark.parametrize(
    "equation", ["ii->i", "bii->b", "i->ii", "...i,ij->...j", "b...->b...", "ij,k->k"]
)
@given(seeds)
@few
def test_einsums_that_are_computed_whole(equation: str, seed: int) -> None:
    """Labels that come twice, other dimensions, sums over an input of its own."""
    chance = Chance(seed)
    rows = chance.rows
    known: dict[str, list[tuple[int, ...]]] = {
        "ii->i": [(rows, rows)],
        "bii->b": [(2, rows, rows)],
        "i->ii": [(rows,)],
        "...i,ij->...j": [(2, rows, 3), (3, rows)],
        "b...->b...": [(rows, 2, rows)],
        "ij,k->k": [(rows, 2), (3,)],
    }
    inputs = [chance.numbers(shape) for shape in known[equation]]
    for _ in range(3):
        placements = [chance.placement(each) for each in inputs]
        case = Case(_einsum(equation), inputs, placements)
        assert_close(run(case, placements, chance), ULPS)


@given(seeds)
@some
def test_a_sum_over_one_input_is_finished_before_an_infinite_factor(seed: int) -> None:
    chance = Chance(seed)
    values = np.zeros((chance.rows, 2), np.float32)
    values[chance.below(chance.rows)] = 1
    factor = np.array([1, np.inf, -np.inf], np.float32)
    case = Case(_einsum("ij,k->k"), [values, factor], [])
    run(case, [Shard(0, chance.rows), REPLICATE], chance).assert_equal()


OF_TERMS: dict[str, Callable[..., Any]] = {
    "MatMul": raw("MatMul"),
    "BatchMatMulV2": raw("BatchMatMulV2"),
    "Einsum": _einsum("ij,jk->ik"),
}


@pytest.mark.parametrize("op", OF_TERMS)
@given(seeds)
@few
def test_terms_times_a_constant_are_terms(op: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        factor = chance.numbers((3, 2))
        values = chance.numbers((4, 3))
        if chance.yes():
            values = chance.spoiled(values)
        return Case(
            lambda v: OF_TERMS[op](v, tf.constant(factor)), [values], [SUM], ULPS, [SUM]
        )

    check(make, seed)


@pytest.mark.parametrize("op", OF_TERMS)
@given(seeds)
@few
def test_terms_are_added_up_before_a_factor_that_may_be_infinite(
    op: str, seed: int
) -> None:
    chance = Chance(seed)
    values = chance.numbers((4, 3))
    factor = chance.numbers((3, 2))
    factor[chance.below(3), chance.below(2)] = chance.of((np.inf, -np.inf, np.nan))
    call = OF_TERMS[op]
    for case in (
        Case(call, [values, factor], [SUM, REPLICATE]),
        Case(call, [values, factor], [REPLICATE, SUM]),
        Case(lambda v: call(v, tf.constant(factor)), [values], [SUM]),
    ):
        assert_close(run(case, case.plain, chance), ULPS)


@given(seeds)
@some
def test_products_of_terms(seed: int) -> None:
    """Only a product that is linear in the terms has terms."""
    chance = Chance(seed)
    inputs = [chance.numbers((2, 3)), chance.numbers((3, 2))]
    placements = [chance.of((SUM, Partial("max"), Partial("min"))) for _ in range(2)]
    for call in OF_TERMS.values():
        assert_close(run(Case(call, inputs, placements), placements, chance), ULPS)
