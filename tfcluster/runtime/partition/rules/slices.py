"""Ops that take a part of a tensor, by where it begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tfcluster.runtime.partition.graph import Node, sizes_of
from tfcluster.runtime.partition.placement import Shard, Split
from tfcluster.runtime.partition.rules.table import (
    LocalOps,
    LocalPlan,
    PlacedOp,
    Whole,
    known,
    require,
    rule,
)
from tfcluster.runtime.partition.writer import Ref


@rule("Slice", linear=0)
def slice_(op: PlacedOp) -> LocalPlan:
    """Along the rows, whole blocks of rows can be taken."""
    shard, begin, size = op.shard(), op.inputs[1].constant, op.inputs[2].constant
    dim, block = shard.dim, shard.block
    if begin is None or size is None:
        return _if_rows_stay(op, shard)
    first, whole = int(begin[dim]), shard.size
    count = int(size[dim]) if size[dim] != -1 else whole - first
    require(first % block == 0 and count % block == 0 and count != 0)

    def build(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
        part = local.split.local_block(shard)
        own_begin, own_size = np.array(begin), np.array(size)
        own_begin[dim], own_size[dim] = first // block * part, count // block * part
        constants = [local.constant(own_begin), local.constant(own_size)]
        return local.repeat(node, [inputs[0], *constants])

    return LocalPlan(op.want([0], shard), [shard.with_outer(count // block)], build)


def _if_rows_stay(op: PlacedOp, shard: Shard) -> LocalPlan:
    """A slice that begins where the data say; all rows must be in it.

    That is known from its size: then it begins with the first row.
    """
    output, size = op.output_shape(), op.constant(2)
    require(output[shard.dim] == shard.size)

    def build(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
        own = np.array(size)
        own[shard.dim] = local.split.local_size(shard)
        return local.repeat(node, [*inputs[:2], local.constant(own)])

    return LocalPlan(op.want([0], shard), [shard], build)


@dataclass(frozen=True, slots=True)
class _Range:
    """One entry of a strided slice, as numbers from 0.

    ``dim`` is the input's dimension, None for a new axis; ``output`` the output's, None
    if the dimension is dropped.
    """

    dim: int | None
    output: int | None
    begin: int
    end: int
    stride: int


def _is_set(op: PlacedOp, mask: str, index: int) -> bool:
    return bool((op.attribute(f"{mask}_mask") or 0) >> index & 1)


def _entries(
    op: PlacedOp, count: int, rank: int
) -> Iterator[tuple[int | None, int | None, int | None]]:
    """What belongs together in a strided slice, whose numbers have ``count`` entries.

    The entry (None: the dimension is whole), the input's dimension (None: it is new),
    the output's dimension (None: it is dropped). The semantics of the masks are those
    of tensorflow/core/util/strided_slice_op.cc.
    """
    is_new = [_is_set(op, "new_axis", i) for i in range(count)]
    is_ellipsis = [_is_set(op, "ellipsis", i) for i in range(count)]
    spent = count - sum(map(max, is_new, is_ellipsis))
    rest: list[int | None] = [None] * (rank - spent)
    entries: list[int | None] = []
    for index in range(count):
        entries += rest if is_ellipsis[index] else [index]
    if not any(is_ellipsis):
        entries += rest
    dim = output = 0
    for entry in entries:
        adds = entry is not None and is_new[entry]
        drops = entry is not None and not adds and _is_set(op, "shrink_axis", entry)
        yield entry, None if adds else dim, None if drops else output
        dim += not adds
        output += not drops


def _ranges(
    op: PlacedOp, numbers: Sequence[Sequence[int]], shape: Sequence[int]
) -> list[_Range]:
    """What a strided slice takes of each dimension of ``shape``."""
    begin, end, strides = numbers
    ranges: list[_Range] = []
    for entry, dim, output in _entries(op, len(begin), len(shape)):
        if dim is None:
            ranges.append(_Range(None, output, 0, 1, 1))
        elif entry is None:
            ranges.append(_Range(dim, output, 0, shape[dim], 1))
        elif output is None:
            first = begin[entry] + (shape[dim] if begin[entry] < 0 else 0)
            ranges.append(_Range(dim, None, first, first + 1, 1))
        else:
            start, stop = (
                None if _is_set(op, mask, entry) else vector[entry]
                for mask, vector in (("begin", begin), ("end", end))
            )
            bounds = slice(start, stop, strides[entry]).indices(shape[dim])
            ranges.append(_Range(dim, output, *bounds))
    return ranges


def _is_empty(taken: _Range) -> bool:
    return (taken.end - taken.begin) * taken.stride <= 0


def _own(
    ranges: Sequence[_Range], shard: Shard, split: Split
) -> tuple[list[list[int]], dict[str, object]]:
    """Begin, end and strides, and the masks, of a rank's part of the same slice."""
    vectors: list[list[int]] = [[], [], []]
    new = shrink = begin_mask = end_mask = 0
    for index, taken in enumerate(ranges):
        first, last = taken.begin, taken.end
        if taken.dim is None:
            new |= 1 << index
        elif taken.output is None:
            shrink |= 1 << index
        if taken.dim == shard.dim:
            part = split.local_block(shard)
            first, last = first // shard.block * part, last // shard.block * part
        if taken.stride < 0 and last < 0:
            end_mask |= 1 << index
        for vector, number in zip(vectors, (first, last, taken.stride), strict=True):
            vector.append(number)
    return vectors, {
        "begin_mask": begin_mask,
        "end_mask": end_mask,
        "ellipsis_mask": 0,
        "new_axis_mask": new,
        "shrink_axis_mask": shrink,
    }


def _numbers(op: PlacedOp) -> list[list[int]] | None:
    """Begin, end and strides of a strided slice; None if they are not all known."""
    constants = [value.constant for value in op.inputs[1:4]]
    vectors = [
        [int(number) for number in vector] for vector in constants if vector is not None
    ]
    return vectors if len(vectors) == len(constants) else None


def _vectors(local: LocalOps, vectors: Sequence[Sequence[int]]) -> list[Ref]:
    return [local.constant(np.array(vector, np.int64)) for vector in vectors]


@rule("StridedSlice", linear=0)
def strided_slice(op: PlacedOp) -> LocalPlan:
    """Along the rows, whole blocks of rows can be taken."""
    shard, shape = op.shard(), op.shape()
    want = op.want([0], shard)
    numbers, sizes = _numbers(op), sizes_of(shape)
    if numbers is None or sizes is None:
        place = _place_of_whole_dimension(op, shard.dim, len(shape))
        return LocalPlan(want, [shard.at(known(place))])
    ranges = _ranges(op, numbers, sizes)
    own = next(taken for taken in ranges if taken.dim == shard.dim)
    if own.output is None or own.stride != 1 or any(map(_is_empty, ranges)):
        raise Whole
    require(own.begin % shard.block == 0 and own.end % shard.block == 0)
    blocks = (own.end - own.begin) // shard.block

    def build(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
        vectors, masks = _own(ranges, shard, local.split)
        return local.op("StridedSlice", [inputs[0], *_vectors(local, vectors)], **masks)

    return LocalPlan(want, [shard.at(own.output).with_outer(blocks)], build)


@rule("StridedSliceGrad", linear=4)
def strided_slice_gradient(op: PlacedOp) -> LocalPlan:
    """Zeros of the sliced tensor's shape, with the gradient where the slice was."""
    shard, shape = op.shard(4), op.constant(0)
    want = op.want([4], shard)
    sizes = [int(size) for size in shape]
    numbers = _numbers(op)
    if numbers is None:
        return _gradient_of_unknown_slice(op, shard, sizes)
    ranges = _ranges(op, numbers, sizes)
    own = next(taken for taken in ranges if taken.output == shard.dim)
    if own.dim is None or own.stride != 1 or sizes[own.dim] % shard.block:
        raise Whole
    require(not any(map(_is_empty, ranges)))
    require(own.begin % shard.block == 0 and own.end % shard.block == 0)
    target = shard.at(own.dim).with_outer(sizes[own.dim] // shard.block)

    def build(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
        vectors, masks = _own(ranges, target, local.split)
        whole = [int(size or 0) for size in local.split.local_shape(sizes, target)]
        grad_inputs = [*_vectors(local, [whole, *vectors]), inputs[4]]
        return local.op("StridedSliceGrad", grad_inputs, **masks)

    return LocalPlan(want, [target], build)


def _gradient_of_unknown_slice(
    op: PlacedOp, shard: Shard, sizes: Sequence[int]
) -> LocalPlan:
    for dim in range(len(sizes)):
        place = _place_of_whole_dimension(op, dim, len(sizes))
        if place == shard.dim and sizes[dim] == shard.size:
            target = shard.at(dim)

            def build(
                local: LocalOps,
                node: Node,
                inputs: Sequence[Ref],
                target: Shard = target,
            ) -> Sequence[Ref]:
                dtype = node.inputs[0].dtype.as_numpy_dtype
                own = np.array(local.split.local_shape(sizes, target), dtype)
                return local.repeat(node, [local.constant(own), *inputs[1:]])

            return LocalPlan(op.want([4], shard), [target], build)
    raise Whole


def _place_of_whole_dimension(op: PlacedOp, dim: int, rank: int) -> int | None:
    """The output's dimension of ``dim``, if a slice with unknown numbers keeps all.

    None if it does not, or if that is not known.
    """
    count = next((s[0] for i in (1, 2, 3) if (s := op.inputs[i].shape)), None)
    step = op.constant(3)
    if count is None:
        return None
    entry, _, output = next(e for e in _entries(op, count, rank) if e[1] == dim)
    if entry is None:
        return output
    is_whole = _is_set(op, "begin", entry) and _is_set(op, "end", entry)
    return output if is_whole and step[entry] == 1 else None
