"""Rules of ops that take a part of a tensor, by where it begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings

from tests.runtime.partition.partners import check_with_partners
from tests.runtime.partition.rule_checks import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    Case,
    Chance,
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
    Placement,
    Shard,
)
from tfcluster.runtime.partition.rules import slices

DTYPES = (*FLOATS, *INTEGERS, np.bool_, *COMPLEX)
many = settings(max_examples=15, deadline=None)


def test_every_op_has_a_case() -> None:
    assert ops_of(slices) == {"Slice", "StridedSlice", "StridedSliceGrad"}


@given(seeds)
@some
def test_slice(seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch()
        begin = [chance.below(size + 1) for size in shape]
        size = [
            -1 if chance.yes(0.3) else chance.below(each - first + 1)
            for each, first in zip(shape, begin, strict=True)
        ]
        blocks = shard.outer
        begin[shard.dim] = chance.below(blocks) * shard.block
        left = blocks - begin[shard.dim] // shard.block
        taken = 1 + chance.below(left)
        size[shard.dim] = -1 if taken == left and chance.yes() else taken * shard.block
        dtype = chance.of(INTEGERS)
        return Case(
            lambda x: tf.slice(x, np.array(begin, dtype), np.array(size, dtype)),
            [chance.numbers(shape, chance.of(DTYPES))],
            [shard],
            0,
            [shard.with_outer(taken)],
        )

    check_with_partners(make, seed)


@dataclass
class _Slice:
    """A strided slice of a shape, entry by entry."""

    shape: Sequence[int]
    numbers: list[list[int]] = field(default_factory=list)
    masks: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            (
                *("begin_mask", "end_mask", "ellipsis_mask"),
                *("new_axis_mask", "shrink_axis_mask"),
            ),
            0,
        )
    )

    def add(self, begin: int, end: int, stride: int, *masks: str) -> None:
        for mask in masks:
            self.masks[f"{mask}_mask"] |= 1 << len(self.numbers)
        self.numbers.append([begin, end, stride])

    def vectors(self, dtype: Any = np.int32) -> list[Any]:
        found = np.array(self.numbers, dtype).reshape(-1, 3)
        return [found[:, i] for i in range(3)]

    def of(self, x: Any, vectors: Sequence[Any] | None = None) -> Any:
        begin, end, strides = self.vectors() if vectors is None else vectors
        return tf.raw_ops.StridedSlice(
            input=x, begin=begin, end=end, strides=strides, **self.masks
        )

    def gradient(self, dy: Any, vectors: Sequence[Any] | None = None) -> Any:
        begin, end, strides = self.vectors() if vectors is None else vectors
        shape = tf.constant(self.shape, begin.dtype)
        return tf.raw_ops.StridedSliceGrad(
            shape=shape, begin=begin, end=end, strides=strides, dy=dy, **self.masks
        )


def _any_range(chance: Chance, size: int) -> tuple[int, int, int, list[str]]:
    """A range of a dimension, maybe empty, with numbers below and above its end."""
    numbers = [chance.below(2 * size + 4) - size - 2 for _ in range(2)]
    stride = chance.of((1, 1, 2, 3, -1, -2))
    masks = [mask for mask in ("begin", "end") if chance.yes(0.3)]
    return numbers[0], numbers[1], stride, masks


def _of_rows(chance: Chance, shard: Shard) -> tuple[int, int, int, list[str]]:
    """A range of whole blocks of rows."""
    first = chance.below(shard.outer)
    last = first + 1 + chance.below(shard.outer - first)
    begin, end = first * shard.block, last * shard.block
    masks = []
    if first == 0 and chance.yes():
        begin, masks = chance.below(5), ["begin"]
    elif chance.yes():
        begin -= shard.size
    if last == shard.outer:
        if chance.yes():
            end, masks = chance.below(5), [*masks, "end"]
        else:
            end += chance.below(3)
    return begin, end, 1, masks


def _random_slice(chance: Chance, shape: Sequence[int], shard: Shard | None) -> _Slice:
    """A slice of anything; of whole blocks of the rows if ``shard`` is given."""
    found = _Slice(shape)
    dims = len(shape)
    hidden = range(0)
    if chance.yes(0.5):
        first = chance.below(dims + 1)
        hidden = range(first, first + chance.below(dims - first + 1))
    has_ellipsis = hidden.stop > 0 or chance.yes(0.3)
    last = dims if has_ellipsis or chance.yes(0.6) else chance.below(dims + 1)
    for dim in range(last + 1):
        if has_ellipsis and dim == hidden.start:
            found.add(chance.below(3), chance.below(3), 1, "ellipsis")
        if dim in hidden:
            continue
        if chance.yes(0.2):
            found.add(chance.below(3), chance.below(3), 1, "new_axis")
        if dim == last:
            break
        size = shape[dim]
        if shard is not None and dim == shard.dim:
            begin, end, stride, masks = _of_rows(chance, shard)
        elif size and chance.yes(0.3):
            begin, end, stride = chance.below(2 * size) - size, chance.below(9), 1
            masks = ["shrink_axis"]
        else:
            begin, end, stride, masks = _any_range(chance, size)
        found.add(begin, end, stride, *masks)
    return found


def _result(taken: _Slice, x: Any) -> Any:
    return np.asarray(taken.of(tf.constant(x)))


@given(seeds)
@many
def test_strided_slice(seed: int) -> None:
    def make(chance: Chance) -> Case:
        while True:
            shape, shard = chance.batch()
            taken = _random_slice(chance, shape, shard)
            x = chance.numbers(shape, chance.of(DTYPES))
            if _result(taken, x).size:
                return Case(taken.of, [x], [shard], 0)

    check_with_partners(make, seed, others=1)


@given(seeds)
@many
def test_strided_slice_of_anything(seed: int) -> None:
    chance = Chance(seed)
    shape, shard = chance.batch()
    taken = _random_slice(chance, shape, None)
    x = chance.numbers(shape)
    found = run(Case(taken.of, [x], [shard]), [shard], chance)
    found.assert_equal()


@given(seeds)
@many
def test_gradient_of_strided_slice(seed: int) -> None:
    def make(chance: Chance) -> Case:
        while True:
            shape, shard = chance.batch()
            taken = _random_slice(chance, shape, shard)
            dims = np.zeros(shape, np.float32)
            result = _result(taken, dims)
            if not result.size:
                continue
            dy = chance.numbers(result.shape, chance.of((*FLOATS, np.int32)))
            # Let propagation say where the rows are in the result.
            where = run(Case(taken.of, [dims], [shard]), [shard], chance).outputs[0]
            return Case(taken.gradient, [dy], [where], 0)

    check_with_partners(make, seed, others=1)


@given(seeds)
@many
def test_gradient_of_strided_slice_of_anything(seed: int) -> None:
    chance = Chance(seed)
    shape, _ = chance.batch()
    taken = _random_slice(chance, shape, None)
    dy = chance.numbers(_result(taken, np.zeros(shape)).shape)
    placement = chance.placement(dy)
    run(Case(taken.gradient, [dy], [placement]), [placement], chance).assert_equal()


@pytest.mark.parametrize("known", [True, False])
@given(seeds)
@some
def test_terms_stay_terms(known: bool, seed: int) -> None:
    chance = Chance(seed)
    shape, _ = chance.batch()
    taken = _random_slice(chance, shape, None)
    x = chance.numbers(shape)
    dy = chance.numbers(_result(taken, x).shape)
    begin = [chance.below(size + 1) for size in shape]
    for call, values in (
        (taken.of, x),
        (taken.gradient, dy),
        (lambda x: tf.slice(x, begin, [-1] * len(begin)), x),
    ):
        case = Case(call, [values], [SUM])
        found = run(case, [SUM], chance)
        assert found.outputs == [SUM]
        found.assert_equal()
        if not known:
            break


UNKNOWN: dict[str, Callable[..., Any]] = {
    "an entry": lambda x, t: x[:, t],
    "the last dimension": lambda x, t: x[..., t],
    "a range": lambda x, t: x[:, t : t + 2],
    "a range of the last dimension": lambda x, t: x[..., t:],
    "with a new axis": lambda x, t: x[:, tf.newaxis, t, ...],
    "after a new axis": lambda x, t: x[tf.newaxis, :, t],
    "before an ellipsis": lambda x, t: x[:, t, ...],
    "slice": lambda x, t: tf.slice(x, [0, t, 0], [-1, 1, -1]),
    "slice of all rows": lambda x, t: tf.slice(x, [0, t, 0], [x.shape[0], 1, 2]),
    "slice that begins anywhere": lambda x, t: tf.slice(
        x, tf.stack([t - t, t, t - t]), [x.shape[0], 1, 2]
    ),
}


@pytest.mark.parametrize("form", UNKNOWN)
@given(seeds)
@few
def test_slice_that_begins_where_the_data_say(form: str, seed: int) -> None:
    chance = Chance(seed)
    rows = chance.rows

    def function(x: Any, t: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = UNKNOWN[form](x, t)
        return found, tape.gradient(found, x, output_gradients=found * 2.0)

    x = chance.numbers((rows, 4, 3))
    placements: list[Placement] = [Shard(0, rows), REPLICATE]
    found = divide(
        function, [x, np.array(chance.below(3), np.int32)], placements, chance.size
    )
    found.assert_equal()
    is_plain = "Slice" not in " ".join(found.computed_whole)
    if rows > 1 and not form.startswith("slice that"):
        assert is_plain, found.computed_whole


@given(seeds)
@some
def test_slices_of_rows_that_the_data_choose(seed: int) -> None:
    chance = Chance(seed)
    rows = chance.rows

    def function(x: Any, n: Any) -> Any:
        return [
            x[n:],
            x[:n],
            x[n],
            x[-1],
            x[::2],
            x[::-1],
            x[1:],
            x[: rows - 1],
            tf.slice(x, [n, 0], [1, -1]),
            tf.slice(x, [0, 0], [n, -1]),
            tf.slice(x, [n, 0], [-1, 2]),
        ]

    x = chance.numbers((rows, 3))
    placements: list[Placement] = [Shard(0, rows), REPLICATE]
    n = np.array(chance.below(rows), np.int32)
    divide(function, [x, n], placements, chance.size).assert_equal()


@given(seeds)
@some
def test_blocks_of_concatenated_rows(seed: int) -> None:
    """Two views of a batch in one tensor, which are then taken apart."""
    chance = Chance(seed)
    rows = max(chance.rows, 2)

    def function(x: Any, y: Any) -> Any:
        both = tf.concat([x, y], 0)
        return both[:rows] - both[rows:], tf.split(both * 2.0, 2)

    values = [chance.numbers((rows, 3)) for _ in range(2)]
    shard = Shard(0, rows)
    found = divide(function, values, [shard, shard], min(chance.size, rows))
    assert found.outputs == [shard] * 3
    found.assert_equal()
