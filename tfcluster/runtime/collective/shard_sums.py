"""The mean of the shards' gradients, with the same bits on any number of ranks.

A batch has a fixed number of shards, each of which belongs to one rank. Each shard's
gradient is scaled by its fraction of the rows, and the products are added up in the
order of ``shard_tree``. Each transport adds in its own order, so the ranks use it to
add two vectors at most, and otherwise to move the vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from tfcluster.runtime.collective import ragged_collectives
from tfcluster.runtime.collective.collectives import Check
from tfcluster.runtime.collective.group import CollectiveCall, Group
from tfcluster.runtime.collective.half_precision import is_half_precision
from tfcluster.runtime.collective.shard_tree import (
    Node,
    added_up,
    halves,
    shard_bounds,
    subtrees,
)
from tfcluster.runtime.collective.signature import Signature
from tfcluster.runtime.collective.sparse import Slices
from tfcluster.runtime.collective.sparse_indices import gathered_indices
from tfcluster.runtime.collective.transports.base import Array, ReduceOp, Transport
from tfcluster.runtime.net.buffer_pool import ALIGNMENT, Pool

_BLOCK = 1 << 16
"""How many numbers are scaled and added up at a time: they stay in the cache."""
_DIRECT_BYTES = 1 << 14
"""Vectors up to this size are sent to every rank, which is faster than two steps."""
_pool = Pool()


def mean_of_shards(
    group: Group,
    shards: int,
    dense: Sequence[Sequence[Array]],
    sparse: Sequence[Sequence[Slices]],
    *,
    weights: Sequence[float],
    signature: Signature,
    check: Check | None = None,
) -> tuple[list[Array], list[Slices]]:
    """The weighted mean of all shards' gradients: the dense and the sparse gradients.

    ``dense[i]``, ``sparse[i]`` and ``weights[i]`` belong to the i-th of this rank's
    shards (``shard_bounds``); a weight is a number of rows. The mean is
    ``sum(weight_s / total * x_s)`` with ``total = sum(weight_s)``, in the order of
    ``shard_tree``; if all weights are equal, it is the sum divided by ``shards``. A
    shard of weight 0 counts as zeros, even if it has NaN. Arrays are float16, bfloat16,
    float32, float64 or complex, of any shape, with equal shapes and dtypes for all
    shards; results are new arrays of the same shapes and dtypes. Half precision is
    summed in float32. Slices are scaled and concatenated in the order of the shards;
    their number may differ. If their indices are ``common``, they are added up one by
    one, in the order of ``shard_tree``. ``check`` compares notes of all ranks in the
    same exchange.

    Raises what ``Group.exchange`` and ``check.compared`` raise.
    """
    note = check.note if check else b""
    # A loss scale may overflow, and the optimizer then skips the step.
    quiet = np.errstate(over="ignore", invalid="ignore")
    with group.exchange(signature, float(sum(weights)), note) as call, quiet:
        # Numbers of rows are integers, so their sum is exact in any order.
        total = sum(call.weights)
        shares = [weight / total if total else 0.0 for weight in weights]
        # All ranks get the same answer: rows are divided as evenly as possible, so if
        # one rank's shards have the average number, all shards have it.
        equal = total > 0 and all(weight * shards == total for weight in weights)
        means = _means(call, shards, dense, None if equal else shares)
        gathered = [_gathered(call, each, shares) for each in zip(*sparse, strict=True)]
    if check:
        check.compared(call.notes)
    return means, gathered


def of_the_chief(
    group: Group,
    dense: Sequence[Array],
    sparse: Sequence[Slices],
    *,
    signature: Signature,
    check: Check | None = None,
) -> tuple[list[Array], list[Slices]]:
    """The chief's gradients of a batch that every rank has computed as a whole.

    Arguments and results are as for ``mean_of_shards``, with one shard. Raises
    what ``Group.exchange`` and ``check.compared`` raise.
    """
    arrays = [*dense, *(a for each in sparse for a in (each.values, each.indices))]
    with group.exchange(signature, 1.0, check.note if check else b"") as call:
        found = [_from_the_chief(call.transport, array) for array in arrays]
    if check:
        check.compared(call.notes)
    count = len(dense)
    pairs = zip(found[count::2], found[count + 1 :: 2], strict=True)
    slices = [
        Slices(values, indices, each.rows)
        for (values, indices), each in zip(pairs, sparse, strict=True)
    ]
    return found[:count], slices


def _from_the_chief(transport: Transport, array: Array) -> Array:
    """The chief's array; its first dimension may differ from that of ``array``."""
    sent = np.ascontiguousarray(array).tobytes() if transport.rank == 0 else b""
    found = np.frombuffer(transport.broadcast(sent, 0), array.dtype)
    return found.reshape((-1, *array.shape[1:]) if array.ndim else ()).copy()


def _means(
    call: CollectiveCall,
    shards: int,
    dense: Sequence[Sequence[Array]],
    shares: Sequence[float] | None,
) -> list[Array]:
    """The means of the dense arrays; arrays of one dtype are packed into one vector.

    If ``shares`` is None, all shards have the same share, and only the sum is scaled.
    """
    own = shard_bounds(shards, call.transport.rank, call.transport.size)
    first = dense[0]
    results: list[Array] = [np.empty(0)] * len(first)
    for dtype in dict.fromkeys(array.dtype for array in first):
        chosen = [i for i, array in enumerate(first) if array.dtype == dtype]
        sums = np.dtype(np.float32) if is_half_precision(dtype) else dtype
        bounds, length = _places([first[i].size for i in chosen], sums.itemsize)
        flat = [[arrays[i].reshape(-1) for i in chosen] for arrays in dense]
        partial = []
        for node in subtrees(shards, *own):
            vector = _pool.empty(length, sums)
            mine = range(node[0] - own[0], node[1] - own[0])
            for place, (start, end) in enumerate(bounds):
                leaves = [flat[i][place] for i in mine]
                factors = [1.0 if shares is None else shares[i] for i in mine]
                _add_up(leaves, factors, vector[start:end])
            for (_, end), (start, _) in pairwise([*bounds, (length, length)]):
                vector[end:start] = 0
            partial.append(vector)
        total = sum_over_ranks(call.transport, partial, shards)
        if shares is None:
            np.multiply(total, total.dtype.type(1.0 / shards), out=total)
        for i, (start, end) in zip(chosen, bounds, strict=True):
            found = total[start:end].reshape(first[i].shape)
            results[i] = found if sums == dtype else found.astype(dtype)
    return results


def _places(sizes: Sequence[int], itemsize: int) -> tuple[list[Node], int]:
    """The positions of arrays of these sizes in one vector, and its length.

    Each array begins at a multiple of ``ALIGNMENT`` bytes, so that TensorFlow can use
    it without a copy.
    """
    step = max(1, ALIGNMENT // itemsize)
    bounds, length = [], 0
    for size in sizes:
        bounds.append((length, length + size))
        length += -(-size // step) * step
    return bounds, length


def _add_up(leaves: Sequence[Array], shares: Sequence[float], out: Array) -> None:
    """Write the sum of ``shares[i] * leaves[i]`` into ``out``, block by block.

    All are vectors of one length. The order is the order of the subtree with these
    leaves: a subtree is halved like the tree, wherever it begins.
    """
    scratch = [
        np.empty(min(_BLOCK, len(out)), out.dtype) for _ in range(_depth(len(leaves)))
    ]
    for start in range(0, len(out), _BLOCK):
        end = min(len(out), start + _BLOCK)
        _block(
            leaves, shares, (0, len(leaves)), slice(start, end), out[start:end], scratch
        )


def _depth(leaves: int) -> int:
    """The number of vectors to keep while a subtree of this many leaves is added up."""
    return max(0, leaves - 1).bit_length()


def _block(
    leaves: Sequence[Array],
    shares: Sequence[float],
    node: Node,
    block: slice,
    out: Array,
    scratch: Sequence[Array],
) -> None:
    """Write the sum of a subtree's leaves into ``out``, for one block of them."""
    if node[1] - node[0] == 1:
        out[:] = _scaled(leaves[node[0]][block], shares[node[0]], out)
        return
    lower, upper = halves(node)
    np.add(
        _value(leaves, shares, lower, block, out, scratch[1:]),
        _value(leaves, shares, upper, block, scratch[0][: len(out)], scratch[1:]),
        out=out,
    )


def _value(
    leaves: Sequence[Array],
    shares: Sequence[float],
    node: Node,
    block: slice,
    space: Array,
    scratch: Sequence[Array],
) -> Array:
    """The sum of a subtree's leaves for one block: in ``space``, or a leaf itself."""
    if node[1] - node[0] == 1:
        return _scaled(leaves[node[0]][block], shares[node[0]], space)
    _block(leaves, shares, node, block, space, scratch)
    return space


def _scaled(values: Array, share: float, space: Array) -> Array:
    """``share * values``, in ``space`` unless it is ``values`` itself."""
    if share == 0.0:
        space[:] = 0  # Not 0 * x: it may be NaN.
        return space
    if values.dtype != space.dtype:
        values = values.astype(space.dtype)
    if share == 1.0:
        return values
    return np.multiply(values, space.dtype.type(share), out=space)


def sum_over_ranks(
    transport: Transport, partial: Sequence[Array], shards: int
) -> Array:
    """The sum of all shards, from this rank's sums of its subtrees, in their order.

    All vectors are contiguous, with one length and dtype, equal on all ranks. So is the
    result, which has the same bits on all ranks. It may be one of the vectors
    ``partial``, which are overwritten. Raises what the methods of ``Transport`` raise.
    """
    size = transport.size
    nodes = [
        subtrees(shards, *shard_bounds(shards, rank, size)) for rank in range(size)
    ]
    vector = partial[0]
    if size == 1 or not len(vector):
        return vector
    if all(len(each) == 1 for each in nodes) and size == 2:
        # The sum of two numbers does not depend on their order.
        transport.allreduce(vector, ReduceOp.SUM)
        return vector
    if vector.nbytes * max(map(len, nodes)) <= _DIRECT_BYTES:
        sent = b"".join(each.tobytes() for each in partial)
        found = _in_order(transport.allgather(sent), nodes, vector.dtype, shards)
        vector[:] = found
        return vector
    # Each rank adds up a part of the vector, and sends it to all.
    bounds = [len(vector) * rank // size for rank in range(size + 1)]
    parts = [
        b"".join(each[start:end].tobytes() for each in partial)
        for start, end in pairwise(bounds)
    ]
    own = _in_order(transport.alltoall(parts), nodes, vector.dtype, shards)
    for (start, end), data in zip(
        pairwise(bounds), transport.allgather(own.tobytes()), strict=True
    ):
        vector[start:end] = np.frombuffer(data, vector.dtype)
    return vector


def _in_order(
    received: Sequence[bytes],
    nodes: Sequence[Sequence[Node]],
    dtype: np.dtype[Any],
    shards: int,
) -> Array:
    """Add up the values of subtrees that the ranks have sent, one by one."""
    known: dict[Node, Array] = {}
    for data, theirs in zip(received, nodes, strict=True):
        values = np.frombuffer(data, dtype).reshape(len(theirs), -1)
        known.update(zip(theirs, values, strict=True))
    return added_up((0, shards), known, np.add)


def _gathered(
    call: CollectiveCall, own: Sequence[Slices], shares: Sequence[float]
) -> Slices:
    """The slices of all shards, scaled, in the order of the shards, or their sums."""
    counted = [
        replace(each, values=each.values * each.values.dtype.type(share))
        if share
        else replace(each, values=each.values[:0], indices=each.indices[:0])
        for each, share in zip(own, shares, strict=True)
    ]
    values, _ = ragged_collectives.allgatherv(
        call.transport, np.concatenate([each.values for each in counted])
    )
    indices = gathered_indices(call.transport, counted)
    if indices.common is None:
        return Slices(values, indices.joined, own[0].rows)
    ends = np.cumsum(list(map(len, indices.parts)))
    zeros = np.zeros((len(indices.common), *values.shape[1:]), values.dtype)
    of_shards = [
        values[end - len(part) : end] if len(part) else zeros
        for part, end in zip(indices.parts, ends, strict=True)
    ]
    known = {(shard, shard + 1): each for shard, each in enumerate(of_shards)}
    total = added_up((0, len(of_shards)), known, np.add)
    return Slices(total, indices.common, own[0].rows)
