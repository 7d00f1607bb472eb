"""Rules of ops that change a tensor's shape, or put tensors together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given

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
from tfcluster.runtime.partition.rules import shapes

DTYPES = (*FLOATS, *INTEGERS, np.bool_, *COMPLEX)
Make = Callable[[Chance], Case]


def _values(chance: Chance, shape: Sequence[int]) -> Any:
    return chance.numbers(shape, chance.of(DTYPES))


def _filled(chance: Chance) -> tuple[tuple[int, ...], Shard]:
    """Like ``chance.batch()``, with elements."""
    shape, shard = chance.batch()
    return tuple(size or 1 for size in shape), shard


def _factors(chance: Chance, number: int) -> tuple[int, ...]:
    """Sizes whose product is ``number``, some of them 1."""
    found = []
    while number > 1:
        divisors = [d for d in range(1, number + 1) if number % d == 0]
        found.append(chance.of(divisors))
        number //= found[-1]
    if chance.yes(0.3):
        found.insert(chance.below(len(found) + 1), 1)
    return tuple(found)


def _reshape(chance: Chance) -> Case:
    """The rows' dimension is split into its factors, or merged with its neighbours."""
    shape, shard = _filled(chance)
    inner = chance.below(len(shape) - shard.dim)
    last = shard.dim + 1 + inner
    after = shape[shard.dim + 1 : last]
    new = list(shape[: shard.dim]) if chance.yes() else []
    before = shape[len(new) : shard.dim]
    merged_outer = math.prod(before) * shard.outer
    merged_inner = shard.inner * math.prod(after)
    outer, rest = [], 1
    if chance.yes() and merged_outer:
        outer, merged_outer = list(_factors(chance, merged_outer)), 1
    if chance.yes() and merged_inner:
        rest, merged_inner = merged_inner, 1
    middle = merged_outer * chance.rows * merged_inner
    inside = list(_factors(chance, rest))
    sizes = [*new, *outer, middle, *inside, *shape[last:]]
    if chance.yes(0.3) and 0 not in sizes:
        sizes[chance.below(len(sizes))] = -1
    divided = 0 not in (merged_outer, merged_inner)
    target = Shard(len(new) + len(outer), chance.rows, merged_outer, merged_inner)
    return Case(
        lambda x: tf.reshape(x, sizes),
        [_values(chance, shape)],
        [shard],
        0,
        [target] if divided and chance.rows > 1 else None,
    )


def _squeeze(chance: Chance) -> Case:
    shape, shard = _filled(chance)
    place = chance.below(len(shape) + 1)
    with_one = (*shape[:place], 1, *shape[place:])
    values = _values(chance, with_one)
    given_shard = shard.at(shard.dim + (place <= shard.dim))
    axis = place - len(with_one) if chance.yes() else place
    return Case(
        lambda x: tf.squeeze(x, [axis]),
        [values],
        [given_shard],
        0,
        [shard] if chance.rows > 1 else None,
    )


def _expand_dims(chance: Chance) -> Case:
    shape, shard = _filled(chance)
    place = chance.below(len(shape) + 1)
    axis = place - len(shape) - 1 if chance.yes() else place
    target = shard.at(shard.dim + (place <= shard.dim))
    values = _values(chance, shape)
    return Case(
        lambda x: tf.expand_dims(x, axis),
        [values],
        [shard],
        0,
        [target] if chance.rows > 1 else None,
    )


def _transpose(chance: Chance) -> Case:
    shape, shard = chance.batch()
    order = [int(each) for each in chance.random.permutation(len(shape))]
    return Case(
        lambda x: tf.transpose(x, order),
        [_values(chance, shape)],
        [shard],
        0,
        [shard.at(order.index(shard.dim))],
    )


def _conjugate_transpose(chance: Chance) -> Case:
    shape, shard = chance.batch()
    order = [int(each) for each in chance.random.permutation(len(shape))]
    values = chance.numbers(shape, chance.of(COMPLEX))
    return Case(
        lambda x: tf.transpose(x, order, conjugate=True),
        [values],
        [shard],
        0,
        [shard.at(order.index(shard.dim))],
    )


def _concat(chance: Chance, along_rows: bool = False) -> Case:
    shape, shard = chance.batch(outer=(1, 2))
    dims = [dim for dim in range(len(shape)) if dim != shard.dim]
    axis = shard.dim if along_rows else chance.of(dims)
    count = 2 + chance.below(2)
    values, plain, blocks = [], [], 0
    dtype = chance.of(DTYPES)
    for _ in range(count):
        own, outer = list(shape), shard.outer
        if along_rows:
            outer = 1 + chance.below(3)
            own[axis] = outer * shard.block
        else:
            own[axis] = chance.below(3)
        values.append(chance.numbers(own, dtype))
        plain.append(shard.with_outer(outer))
        blocks += outer
    given_axis = axis - len(shape) if chance.yes() else axis
    return Case(
        lambda *inputs: tf.raw_ops.ConcatV2(values=list(inputs), axis=given_axis),
        values,
        plain,
        0,
        [shard.with_outer(blocks) if along_rows else shard],
    )


def _batches_of_several_sizes(chance: Chance) -> Case:
    first = 2 + chance.below(4)
    second = 2 * first + 1
    dtype = chance.of(DTYPES)
    return Case(
        lambda *inputs: tf.concat(inputs, 0),
        [chance.numbers([rows, 3], dtype) for rows in (first, second)],
        [Shard(0, first), Shard(0, second)],
        0,
        [Shard(0, first + second)],
    )


def _old_concat(chance: Chance) -> Case:
    case = _concat(chance, along_rows=chance.yes())
    shape = case.inputs[0].shape
    sizes = [each.shape for each in case.inputs]
    differ = [d for d in range(len(shape)) if len({s[d] for s in sizes}) > 1]
    axis = differ[0] if differ else len(shape) - 1
    return Case(
        lambda *inputs: tf.raw_ops.Concat(concat_dim=axis, values=list(inputs)),
        case.inputs,
        case.plain,
        0,
    )


def _split(chance: Chance) -> Case:
    shape, shard = chance.batch(outer=(1, 2))
    sizes = list(shape)
    count = 1 + chance.below(3)
    if chance.yes():
        axis = shard.dim
        shard = shard.with_outer(shard.outer * count)
        sizes[axis] = shard.size
        target = shard.with_outer(shard.outer // count)
    else:
        axis = chance.of([dim for dim in range(len(shape)) if dim != shard.dim])
        sizes[axis] *= count
        target = shard
    given_axis = axis - len(shape) if chance.yes() else axis
    return Case(
        lambda x: tf.split(x, count, given_axis),
        [_values(chance, sizes)],
        [shard],
        0,
        [target] * count,
    )


def _split_unequally(chance: Chance) -> Case:
    shape, shard = chance.batch(outer=(1, 2))
    sizes = list(shape)
    if chance.yes():
        axis, unit = shard.dim, shard.block
        parts = [chance.below(3) + 1 for _ in range(2)]
        sizes[axis] = sum(parts) * unit
        shard = shard.with_outer(sum(parts))
        targets = [shard.with_outer(part) for part in parts]
    else:
        axis, unit = (
            chance.of([dim for dim in range(len(shape)) if dim != shard.dim]),
            1,
        )
        parts = [chance.below(3), 1 + chance.below(2)]
        sizes[axis] = sum(parts)
        targets = [shard, shard]
    pieces = [part * unit for part in parts]
    if chance.yes(0.3):
        pieces[0] = -1
    given_axis = axis - len(shape) if chance.yes() else axis
    return Case(
        lambda x: tf.split(x, pieces, given_axis),
        [_values(chance, sizes)],
        [shard],
        0,
        targets,
    )


def _pack(chance: Chance) -> Case:
    shape, shard = chance.batch()
    dtype = chance.of(DTYPES)
    values = [chance.numbers(shape, dtype) for _ in range(1 + chance.below(3))]
    place = chance.below(len(shape) + 1)
    axis = place - len(shape) - 1 if chance.yes() else place
    return Case(
        lambda *inputs: tf.stack(inputs, axis),
        values,
        [shard] * len(values),
        0,
        [shard.at(shard.dim + (place <= shard.dim))],
    )


def _unpack(chance: Chance) -> Case:
    shape, shard = chance.batch()
    place = chance.below(len(shape) + 1)
    count = 1 + chance.below(3)
    values = _values(chance, (*shape[:place], count, *shape[place:]))
    axis = place - len(shape) - 1 if chance.yes() else place
    return Case(
        lambda x: tf.unstack(x, count, axis),
        [values],
        [shard.at(shard.dim + (place <= shard.dim))],
        0,
        [shard] * count,
    )


def _tile(chance: Chance) -> Case:
    shape, shard = chance.batch()
    multiples = [1 + chance.below(3) for _ in shape]
    return Case(
        lambda x: tf.tile(x, multiples),
        [_values(chance, shape)],
        [shard],
        0,
        [shard.with_outer(shard.outer * multiples[shard.dim])],
    )


def _broadcast_to(chance: Chance) -> Case:
    shape, shard = chance.batch()
    own = [
        1 if dim != shard.dim and chance.yes(0.4) else size
        for dim, size in enumerate(shape)
    ]
    more = chance.dims(chance.below(3))
    return Case(
        lambda x: tf.broadcast_to(x, (*more, *shape)),
        [_values(chance, own)],
        [shard],
        0,
        [shard.at(shard.dim + len(more))] if chance.rows > 1 else None,
    )


def _reverse(chance: Chance) -> Case:
    shape, shard = chance.batch()
    axes = [
        dim - len(shape) if chance.yes() else dim
        for dim in range(len(shape))
        if dim != shard.dim and chance.yes()
    ]
    return Case(
        lambda x: tf.reverse(x, axes), [_values(chance, shape)], [shard], 0, [shard]
    )


def _roll(chance: Chance) -> Case:
    shape, shard = chance.batch(outer=(1, 2))
    dims = [dim for dim in range(len(shape)) if dim != shard.dim]
    axes = [chance.of(dims) for _ in range(1 + chance.below(2))]
    shifts = [chance.below(5) - 2 for _ in axes]
    return Case(
        lambda x: tf.roll(x, shifts, axes), [_values(chance, shape)], [shard], 0
    )


def _pad(chance: Chance) -> Case:
    shape, shard = chance.batch()
    widths = [[chance.below(3), chance.below(3)] for _ in shape]
    before, after = widths[shard.dim]
    widths[shard.dim] = [before * shard.block, after * shard.block]
    return Case(
        lambda x: tf.raw_ops.Pad(input=x, paddings=widths),
        [_values(chance, shape)],
        [shard],
        0,
        [shard.with_outer(before + shard.outer + after)],
    )


def _pad_with(chance: Chance) -> Case:
    case = _pad(chance)
    shape, (shard,) = case.inputs[0].shape, case.plain
    assert isinstance(shard, Shard)
    widths = [[chance.below(3), chance.below(3)] for _ in shape]
    widths[shard.dim] = [0, shard.block]
    fill = chance.numbers((), case.inputs[0].dtype)
    return Case(
        lambda x, y: tf.raw_ops.PadV2(input=x, paddings=widths, constant_values=y),
        [*case.inputs, fill],
        [shard, REPLICATE],
        0,
        [shard.with_outer(shard.outer + 1)],
    )


def _mirror(chance: Chance) -> tuple[tuple[int, ...], Shard, list[list[int]], str]:
    shape, shard = chance.batch()
    sizes = tuple(size or 1 for size in shape)
    mode = chance.of(("REFLECT", "SYMMETRIC"))
    most = [size if mode == "SYMMETRIC" else size - 1 for size in sizes]
    widths = [[chance.below(each + 1), chance.below(each + 1)] for each in most]
    widths[shard.dim] = [0, 0]
    return sizes, shard, widths, mode


def _mirror_pad(chance: Chance) -> Case:
    sizes, shard, widths, mode = _mirror(chance)
    values = chance.numbers(sizes, chance.of((*FLOATS, *INTEGERS)))
    return Case(
        lambda x: tf.raw_ops.MirrorPad(input=x, paddings=widths, mode=mode),
        [values],
        [shard],
        0,
        [shard],
    )


def _mirror_pad_gradient(chance: Chance) -> Case:
    sizes, shard, widths, mode = _mirror(chance)
    padded = [s + sum(w) for s, w in zip(sizes, widths, strict=True)]
    values = chance.numbers(padded, chance.of((np.float32, np.float64)))
    return Case(
        lambda x: tf.raw_ops.MirrorPadGrad(input=x, paddings=widths, mode=mode),
        [values],
        [shard],
        8,
        [shard],
    )


def _space_to_batch(chance: Chance) -> Case:
    shard = chance.shard(0)
    dims = 1 + chance.below(2)
    block = [1 + chance.below(3) for _ in range(dims)]
    space = [b * (1 + chance.below(2)) for b in block]
    pads = [[chance.below(2) * b, chance.below(2) * b] for b in block]
    shape = (shard.size, *space, *chance.dims(chance.below(2)))
    return Case(
        lambda x: tf.space_to_batch_nd(x, block, pads),
        [chance.numbers(shape, chance.of((*FLOATS, *INTEGERS)))],
        [shard],
        0,
        [shard.with_outer(shard.outer * math.prod(block))],
    )


def _batch_to_space(chance: Chance) -> Case:
    shard = chance.shard(0)
    dims = 1 + chance.below(2)
    block = [1 + chance.below(3) for _ in range(dims)]
    crops = [[chance.below(b), 0] for b in block]
    shard = shard.with_outer(shard.outer * math.prod(block))
    space = [2 + chance.below(2) for _ in block]
    shape = (shard.size, *space, *chance.dims(chance.below(2)))
    return Case(
        lambda x: tf.raw_ops.BatchToSpaceND(input=x, block_shape=block, crops=crops),
        [chance.numbers(shape, chance.of((*FLOATS, *INTEGERS)))],
        [shard],
        0,
        [shard.with_outer(shard.outer // math.prod(block))],
    )


CASES: dict[str, Make] = {
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "ExpandDims": _expand_dims,
    "Transpose": _transpose,
    "ConjugateTranspose": _conjugate_transpose,
    "Concat": _old_concat,
    "ConcatV2": _concat,
    "Split": _split,
    "SplitV": _split_unequally,
    "Pack": _pack,
    "Unpack": _unpack,
    "Tile": _tile,
    "BroadcastTo": _broadcast_to,
    "ReverseV2": _reverse,
    "Roll": _roll,
    "Pad": _pad,
    "PadV2": _pad_with,
    "MirrorPad": _mirror_pad,
    "MirrorPadGrad": _mirror_pad_gradient,
    "SpaceToBatchND": _space_to_batch,
    "BatchToSpaceND": _batch_to_space,
}
OTHERS = {"Fill"}
# The inputs that may also be terms of a sum, without an exchange.
LINEAR = {
    *("Reshape", "Squeeze", "ExpandDims", "Transpose", "ConjugateTranspose"),
    *("Concat", "ConcatV2", "Split", "SplitV", "Pack", "Unpack", "Tile", "Pad"),
    *("ReverseV2", "Roll", "SpaceToBatchND", "BatchToSpaceND"),
}


def test_every_op_has_a_case() -> None:
    assert {*CASES, *OTHERS} == ops_of(shapes)


@pytest.mark.parametrize("op", CASES)
@given(seeds)
@few
def test_rule(op: str, seed: int) -> None:
    check_with_partners(CASES[op], seed)


@pytest.mark.parametrize("op", ["Reshape", "SpaceToBatchND", "BatchToSpaceND", "Pad"])
@given(seeds)
@some
def test_rows_merge_with_other_dimensions(op: str, seed: int) -> None:
    check_with_partners(CASES[op], seed, others=0)


@given(seeds)
@some
def test_concatenated_rows(seed: int) -> None:
    check_with_partners(lambda chance: _concat(chance, along_rows=True), seed)


@given(seeds)
@some
def test_concatenated_batches_of_several_sizes(seed: int) -> None:
    check_with_partners(_batches_of_several_sizes, seed, others=0)


@pytest.mark.parametrize("op", sorted(LINEAR))
@given(seeds)
@few
def test_terms_stay_terms(op: str, seed: int) -> None:
    chance = Chance(seed)
    case = CASES[op](chance)
    inputs = [
        chance.numbers(each.shape, np.complex64 if "Conj" in op else np.float64)
        for each in case.inputs
    ]
    found = run(replace(case, inputs=inputs), [SUM] * len(inputs), chance)
    assert not found.computed_whole
    assert all(each == SUM for each in found.outputs)
    found.assert_equal()


@given(seeds)
@some
def test_fill(seed: int) -> None:
    chance = Chance(seed)
    case = Case(lambda x: tf.fill([2, 3], x), [chance.numbers(())], [SUM])
    found = run(case, [SUM], chance)
    assert found.outputs == [SUM]
    found.assert_equal()


@given(seeds)
@some
def test_shapes_that_depend_on_the_data(seed: int) -> None:
    """Sizes, axes and counts that are known only when the function runs."""
    chance = Chance(seed)
    rows = chance.rows

    def function(x: Any, n: Any) -> Any:
        padded = tf.pad(x, [[0, 0], [n[0], 1]])
        return [
            padded,
            tf.tile(x, [1, n[1]]),
            tf.tile(x, [n[0], 1]),
            tf.reshape(padded, [rows, -1]),
            tf.reshape(padded, [-1]),
            tf.concat([padded, x], 1),
            tf.concat([padded, padded], 0),
            tf.roll(x, n[0], n[1] - 2),
            tf.reverse(x, [n[1] - 2]),
            tf.transpose(x, [n[0] - 1, 2 - n[0]]),
            tf.expand_dims(x, n[1] - 2),
            tf.split(padded, [1, n[0] + 3], 1)[1],
            tf.broadcast_to(x, [n[1], rows, 3]),
            tf.fill([n[1], 2], x[0, 0]),
        ]

    values = chance.numbers((rows, 3))
    placements: list[Placement] = [Shard(0, rows), REPLICATE]
    found = divide(
        function, [values, np.array([1, 2], np.int32)], placements, chance.size, rows
    )
    found.assert_equal()


@given(seeds)
@some
def test_results_without_elements(seed: int) -> None:
    chance = Chance(seed)
    rows = chance.rows

    def function(x: Any) -> Any:
        empty = x[:, :0]
        return [
            tf.tile(x, [0, 1]),
            tf.tile(empty, [2, 1]),
            tf.reshape(empty, [0]),
            tf.reshape(empty, [rows, 0, 2]),
            tf.concat([tf.transpose(empty), tf.transpose(x)], 0),
            tf.concat([tf.transpose(empty)[0:0], tf.transpose(empty)], 1),
            tf.concat([x, x[0:0]], 0),
            tf.reshape(tf.reshape(empty, [0, rows]), [-1, rows, 2]),
            tf.concat([tf.reshape(empty, [0])] * 2, 0),
            tf.pad(tf.reshape(empty, [0]), [[1, 1]]),
            tf.reshape(empty, [0])[0:0],
            tf.stack([empty, empty], 1),
        ]

    found = divide(function, [chance.numbers((rows, 3))], [Shard(0, rows)], chance.size)
    found.assert_equal()
