"""Rules of products of sparse matrices, and of losses with sparse labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import given

from tests.runtime.partition.rule_checks import (
    INTEGERS,
    WIDE_FLOATS,
    Case,
    Chance,
    check,
    ops_of,
    raw,
    run,
    seeds,
    some,
)
from tfcluster.runtime.partition.placement import REPLICATE, Shard
from tfcluster.runtime.partition.rules import sparse


def test_every_op_has_a_case() -> None:
    # The second has a kernel on graphics cards only, and the rule of the first.
    assert ops_of(sparse) == {"SparseTensorDenseMatMul", "CTCLoss", "CTCLossV2"}


def _entries(chance: Chance, rows: int, columns: int, dtype: Any) -> list[Any]:
    count = chance.below(6)
    places = np.sort(chance.random.integers(0, rows * columns, count))
    found = np.stack(np.unravel_index(places, (rows, columns)), -1)
    return [
        found.astype(np.int64),
        chance.numbers((count,), dtype),
        np.array([rows, columns], np.int64),
    ]


@given(seeds)
@some
def test_sparse_matrix_times_dense(seed: int) -> None:
    def make(chance: Chance) -> Case:
        dtype = chance.of((*WIDE_FLOATS, np.int32))
        first, second = chance.yes(), chance.yes()
        by_columns = chance.yes()
        shard = chance.shard(0)
        if by_columns:
            rows, common, columns = 3, 4, shard.size
            target = shard.at(1)
        else:
            shard = Shard(0, chance.rows, 1, shard.inner)
            rows = common = shard.size
            columns = 3
            target = shard
        shape = (rows, common)
        entries = _entries(chance, *(shape[::-1] if first else shape), dtype)
        dense = chance.numbers((common, columns), dtype)
        dim = 1 if by_columns else 0
        multiply = raw("SparseTensorDenseMatMul", adjoint_a=first, adjoint_b=second)
        return Case(
            lambda places, values, x: multiply(places, values, entries[2], x),
            [*entries[:2], dense.T.copy() if second else dense],
            [REPLICATE, REPLICATE, shard.at(1 - dim if second else dim)],
            0,
            outputs=[target],
        )

    check(make, seed)


@given(seeds)
@some
def test_sequences_with_labels(seed: int) -> None:
    def make(chance: Chance) -> Case:
        rows, steps, classes = chance.rows, 6, 4
        lengths = chance.random.integers(1, 3, rows)
        places = [(row, step) for row in range(rows) for step in range(lengths[row])]
        indices = np.array(places, np.int64).reshape(-1, 2)
        labels = chance.random.integers(0, classes - 1, len(places)).astype(np.int32)
        shard = Shard(1, rows)
        return Case(
            raw("CTCLoss", ignore_longer_outputs_than_inputs=True),
            [
                chance.numbers((steps, rows, classes)),
                indices,
                labels,
                np.full(rows, steps, np.int32),
            ],
            [shard, REPLICATE, REPLICATE, chance.of((REPLICATE, shard.at(0)))],
            outputs=[shard.at(0), shard],
        )

    check(make, seed, others=0)


@given(seeds)
@some
def test_what_is_found_in_the_rows_is_whole(seed: int) -> None:
    """Ops whose results have unknown sizes, followed by what is divided."""

    def make(chance: Chance) -> Case:
        shard = Shard(0, chance.rows)

        def function(x: Any) -> Any:
            unique, places = tf.unique(x)
            places_of_true = tf.where(x > 1)
            return tf.gather(unique, places), places_of_true

        numbers = chance.random.integers(0, 4, chance.rows).astype(chance.of(INTEGERS))
        return Case(function, [numbers], [shard])

    chance = Chance(seed)
    case = make(chance)
    found = run(case, case.plain, chance)
    assert set(found.computed_whole) <= {"Unique", "Where", "GatherV2"}
    found.assert_equal()
