"""Rules of ops that read and add at indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given

from tests.runtime.partition.partners import check_with_partners
from tests.runtime.partition.rule_checks import (
    FLOATS,
    HALVES,
    INTEGERS,
    WIDE_FLOATS,
    Array,
    Case,
    Chance,
    check,
    few,
    ops_of,
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
from tfcluster.runtime.partition.rules import gathers

OPS = {
    *("Gather", "GatherV2", "ResourceGather", "GatherNd", "ResourceGatherNd"),
    *("ScatterNd", "UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin"),
    *("UnsortedSegmentProd", "DenseBincount"),
}
ADDABLE = (*FLOATS, *INTEGERS)


def test_every_op_has_a_case() -> None:
    assert ops_of(gathers) == OPS


def _indices(chance: Chance, shape: Sequence[int], end: int, low: int = 0) -> Array:
    values = chance.random.integers(low, end, shape)
    return values.astype(chance.of(INTEGERS))


def _numbers(chance: Chance, shape: Sequence[int]) -> Array:
    """Numbers whose sum is exact, also that of many in half precision."""
    dtype = chance.of(ADDABLE)
    most = 0.5 if dtype in HALVES else 3.0
    return chance.numbers(shape, dtype, -most, most)


@given(seeds)
@some
def test_old_gather(seed: int) -> None:
    def make(chance: Chance) -> Case:
        table = _numbers(chance, (4, *chance.dims(chance.below(3))))
        shape, shard = chance.batch()
        return Case(
            lambda x, i: tf.raw_ops.Gather(params=x, indices=i),
            [table, _indices(chance, shape, 4)],
            [REPLICATE, shard],
            0,
            [shard],
        )

    check_with_partners(make, seed)


@given(seeds)
@some
def test_gather_by_divided_indices(seed: int) -> None:
    def make(chance: Chance) -> Case:
        batch = chance.dims(chance.below(2))
        between, after = chance.dims(chance.below(3)), chance.dims(chance.below(2))
        shape, shard = chance.batch(outer=(0, 1))
        axis = len(batch) + len(between)
        table = _numbers(chance, (*batch, *between, 4, *after))
        given_axis = axis - table.ndim if chance.yes() else axis
        divided = shard.at(shard.dim + len(batch))
        return Case(
            lambda x, i: tf.gather(x, i, axis=given_axis, batch_dims=len(batch)),
            [table, _indices(chance, (*batch, *shape), 4)],
            [REPLICATE, divided],
            0,
            [shard.at(axis + shard.dim)],
        )

    check_with_partners(make, seed)


@given(seeds)
@some
def test_gather_from_rows(seed: int) -> None:
    """Each row has a table, and indices of its own."""

    def make(chance: Chance) -> Case:
        batch, shard = chance.batch(outer=(0, 1))
        between, after = chance.dims(chance.below(2)), chance.dims(chance.below(2))
        axis = len(batch) + len(between)
        table = _numbers(chance, (*batch, *between, 4, *after))
        indices = _indices(chance, (*batch, *chance.dims(chance.below(3))), 4)
        negative = chance.yes() and indices.ndim > len(batch)
        count = len(batch) - indices.ndim if negative else len(batch)
        return Case(
            lambda x, i: tf.gather(x, i, axis=axis, batch_dims=count),
            [table, indices],
            [shard, shard],
            0,
            [shard],
        )

    check_with_partners(make, seed)


@given(seeds)
@some
def test_gather_from_a_divided_table(seed: int) -> None:
    """The rows are in another dimension than the one that is looked up."""

    def make(chance: Chance) -> Case:
        shape, shard = chance.batch()
        axis = chance.below(len(shape) + 1)
        table = _numbers(chance, (*shape[:axis], 4, *shape[axis:]))
        indices = _indices(chance, chance.dims(chance.below(3)), 4)
        is_after = shard.dim >= axis
        return Case(
            lambda x, i: tf.gather(x, i, axis=axis),
            [table, indices],
            [shard.at(shard.dim + is_after), REPLICATE],
            0,
            [shard.at(shard.dim + (indices.ndim if is_after else 0))],
        )

    check_with_partners(make, seed)


@given(seeds)
@some
def test_gather_from_a_variable(seed: int) -> None:
    chance = Chance(seed)
    batch = chance.dims(chance.below(2))
    table = tf.Variable(chance.numbers((*batch, 4, *chance.dims(chance.below(3)))))
    shape, shard = chance.batch()
    indices = _indices(chance, (*batch, *shape), 4)

    def call(i: Any) -> Any:
        return tf.raw_ops.ResourceGather(
            resource=table.handle, indices=i, batch_dims=len(batch), dtype=tf.float32
        )

    place = shard.at(shard.dim + len(batch))
    found = divide(call, [indices], [place], chance.size, chance.rows)
    assert found.outputs == [place]
    found.assert_equal()
    other = chance.placement(indices)
    if not isinstance(other, Partial):
        divide(call, [indices], [other], chance.size, chance.rows).assert_equal()


@given(seeds)
@some
def test_gather_of_slices_from_a_variable(seed: int) -> None:
    chance = Chance(seed)
    table = tf.Variable(chance.numbers((3, 3, *chance.dims(chance.below(2)))))
    shape, shard = chance.batch(own=(1 + chance.below(2),))

    def call(i: Any) -> Any:
        return tf.raw_ops.ResourceGatherNd(
            resource=table.handle, indices=i, dtype=tf.float32
        )

    indices = _indices(chance, shape, 3)
    found = divide(call, [indices], [shard], chance.size, chance.rows)
    assert found.outputs == [shard]
    found.assert_equal()


@given(seeds)
@some
def test_gather_of_slices(seed: int) -> None:
    def make(chance: Chance) -> Case:
        table = _numbers(chance, (3, 3, *chance.dims(chance.below(2))))
        shape, shard = chance.batch(own=(1 + chance.below(2),))
        return Case(
            tf.gather_nd,
            [table, _indices(chance, shape, 3)],
            [REPLICATE, shard],
            0,
            [shard],
        )

    check_with_partners(make, seed)


@given(seeds)
@some
def test_scatter(seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch(own=(1 + chance.below(2),))
        rest = chance.dims(chance.below(2))
        updates = _numbers(chance, (*shape[:-1], *rest))
        result = (*(3 for _ in range(shape[-1])), *rest)
        indices = _indices(chance, shape, 3)
        return Case(
            lambda i, x: tf.scatter_nd(i, x, tf.constant(result, i.dtype)),
            [indices, updates],
            [shard, shard],
            0,
            [SUM],
            adds_up=True,
        )

    check(make, seed)


@given(seeds)
@some
def test_scatter_of_booleans(seed: int) -> None:
    chance = Chance(seed)
    shape, shard = chance.batch(own=(1,))
    indices = _indices(chance, shape, 3)
    values = chance.numbers(shape[:-1], np.bool_)
    case = Case(
        lambda i, x: tf.scatter_nd(i, x, tf.constant([3], i.dtype)),
        [indices, values],
        [],
    )
    run(case, [shard, shard], chance).assert_equal()


@pytest.mark.parametrize("kind", ["sum", "max", "min", "prod"])
@given(seeds)
@some
def test_segments(kind: str, seed: int) -> None:
    """The segments of the rows; a rank may have no row of a segment."""
    op = getattr(tf.math, f"unsorted_segment_{kind}")

    def make(chance: Chance) -> Case:
        shape, shard = chance.batch(outer=(0, 1))
        rest = chance.dims(chance.below(2))
        data = _numbers(chance, (*shape, *rest))
        segments = _indices(chance, shape, 3, -1)
        outputs: list[Placement] = [SUM if kind == "sum" else Partial(kind)]
        return Case(
            lambda x, i: op(x, i, 4), [data, segments], [shard, shard], 0, outputs, True
        )

    if kind == "prod":
        chance = Chance(seed)
        case = make(chance)
        run(case, case.plain, chance).assert_equal()
        return
    check(make, seed)


@pytest.mark.parametrize("kind", ["sum", "max", "min", "prod"])
@given(seeds)
@some
def test_segments_of_something_else(kind: str, seed: int) -> None:
    """The rows are in a dimension of the data that has no segments."""
    op = getattr(tf.math, f"unsorted_segment_{kind}")

    def make(chance: Chance) -> Case:
        rest, shard = chance.batch(outer=(0, 1))
        own = chance.dims(1 + chance.below(2))
        data = _numbers(chance, (*own, *rest))
        segments = _indices(chance, own, 3, -1)
        return Case(
            lambda x, i: op(x, i, 4),
            [data, segments],
            [shard.at(shard.dim + len(own)), REPLICATE],
            0,
            [shard.at(shard.dim + 1)],
        )

    check_with_partners(make, seed)


@given(seeds)
@some
def test_counts(seed: int) -> None:
    def make(chance: Chance) -> Case:
        shard = chance.shard(0)
        values = _indices(chance, (shard.size,), 5)
        weights = chance.numbers((shard.size,), chance.of((*WIDE_FLOATS, *INTEGERS)))
        is_binary, has_weights = chance.yes(), chance.yes()
        plain: list[Placement] = [shard, shard if has_weights else REPLICATE]
        return Case(
            lambda x, w: tf.raw_ops.DenseBincount(
                input=x,
                size=tf.constant(4, x.dtype),
                weights=w,
                binary_output=is_binary,
            ),
            [values, weights if has_weights else weights[:0]],
            plain,
            0,
            [Partial("max") if is_binary else SUM],
            adds_up=True,
        )

    check(make, seed)


@given(seeds)
@some
def test_counts_of_rows(seed: int) -> None:
    def make(chance: Chance) -> Case:
        shard = chance.shard(0)
        shape = (shard.size, 3)
        has_weights, is_binary = chance.yes(), chance.yes()
        weights = chance.numbers(shape if has_weights else (0,))
        return Case(
            lambda x, w: tf.raw_ops.DenseBincount(
                input=x,
                size=tf.constant(4, x.dtype),
                weights=w,
                binary_output=is_binary,
            ),
            [_indices(chance, shape, 5), weights],
            [shard, shard if has_weights else REPLICATE],
            0,
            [shard],
        )

    check_with_partners(make, seed)


@given(seeds)
@few
def test_counts_up_to_the_largest_value(seed: int) -> None:
    """The size of the result is that of the whole, whatever a rank's rows are."""
    chance = Chance(seed)
    rows = chance.rows
    values = _indices(chance, (rows,), 3)
    values[chance.below(rows)] = 5
    weights = chance.numbers((rows,))

    def function(x: Any, w: Any) -> Any:
        return [
            tf.math.bincount(x),
            tf.math.bincount(x, weights=w),
            tf.math.bincount(x, minlength=7),
            tf.math.bincount(x, maxlength=2),
            tf.math.bincount(tf.stack([x, x], 1), axis=-1),
            tf.math.confusion_matrix(x, x),
            tf.math.unsorted_segment_sum(w, x, tf.reduce_max(x) + 1),
            tf.math.segment_sum(w, tf.sort(x)),
            tf.math.segment_mean(w, tf.sort(x)),
            tf.math.unsorted_segment_mean(w, x, 6),
            tf.math.unsorted_segment_sqrt_n(w, x, 6),
            tf.unique(x),
            tf.boolean_mask(w, x > 1),
            tf.dynamic_partition(w, tf.cast(x > 1, tf.int32), 2),
            tf.where(x > 1),
        ]

    shard = Shard(0, rows)
    found = divide(function, [values, weights], [shard, shard], chance.size, rows)
    found.assert_equal(1e-6)


@given(seeds)
@few
def test_gradients(seed: int) -> None:
    """Of a table, from rows that may use the same entries."""
    chance = Chance(seed)
    shape, shard = chance.batch()
    shape = tuple(size or 1 for size in shape)
    table = chance.numbers((4, 3), np.float64)
    indices = _indices(chance, shape, 4)
    weights = chance.numbers((*shape, 3), np.float64)

    def function(x: Any, i: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = tf.gather(x, i) * w
            loss = tf.reduce_sum(found) + tf.reduce_sum(
                tf.gather_nd(x, tf.stack([i, i % 3], -1)) * w[..., 0]
            )
        return loss, tf.convert_to_tensor(tape.gradient(loss, x))

    found = divide(
        function,
        [table, indices, weights],
        [REPLICATE, shard, shard],
        chance.size,
        chance.rows,
    )
    found.assert_equal()
    assert not found.computed_whole


def test_rows_are_exchanged_if_their_sum_is_larger() -> None:
    """As for the gradient of a table of embeddings."""
    ids, rows = np.arange(6, dtype=np.int32) * 3, np.ones((6, 2))

    def added(rows: Any, ids: Any) -> Any:
        return tf.math.unsorted_segment_sum(2.0 * rows, ids + 1, 100)

    shard = Shard(0, 6)
    found = divide(added, [rows, ids], [shard, shard], 2, 6)
    found.assert_equal()
    (exchanged,) = found.written.exchanged
    assert {value.shape for value in exchanged} == {(6,), (6, 2)}
