"""Reductions over the shards of a batch, with the same bits on any number of ranks.

Floating-point addition is not associative, so the order of the additions decides the
last bits of a sum. Here the order is that of a fixed binary tree. It depends only on
the number of shards, not on which rank has which shard: the sum of shards [first, last)
is the sum of their lower and their upper half. A rank adds up the largest subtrees that
it has completely, and then the ranks add up these sums. Each transport adds in its own
order, so the ranks use it to add two vectors at most, and otherwise to move them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from tfcluster.runtime.collective.packing import CollectiveCall, packed
from tfcluster.runtime.collective.transports.base import UFUNCS, Array, ReduceOp
from tfcluster.runtime.collective.transports.hierarchical import HostTransport

T = TypeVar("T")

Node = tuple[int, int]
"""The first shard of a subtree, and the shard after its last."""


def shard_bounds(shards: int, rank: int, size: int) -> Node:
    """The first shard of a rank, and the shard after its last.

    ``rank`` is below ``size``, and ``size`` is at most ``shards``: each rank has at
    least one shard, and the ranks' numbers of shards differ by at most one.
    """
    return rank * shards // size, (rank + 1) * shards // size


def halves(node: Node) -> tuple[Node, Node]:
    """The two subtrees of a node with two shards or more."""
    first, last = node
    middle = (first + last) // 2
    return (first, middle), (middle, last)


def subtrees(shards: int, first: int, last: int) -> list[Node]:
    """The largest subtrees that consist of shards in [first, last), in their order."""
    return _within((0, shards), first, last)


def _within(node: Node, first: int, last: int) -> list[Node]:
    if first <= node[0] and node[1] <= last:
        return [node]
    if node[1] <= first or last <= node[0]:
        return []
    lower, upper = halves(node)
    return [*_within(lower, first, last), *_within(upper, first, last)]


def added_up(node: Node, values: Mapping[Node, T], add: Callable[[T, T], T]) -> T:
    """The value of a node, given the values of subtrees that together cover it.

    ``add(lower, upper)`` adds the values of two halves. Raises KeyError if the known
    subtrees do not cover the node.
    """
    value = values.get(node)
    if value is not None:
        return value
    if node[1] - node[0] < 2:
        raise KeyError(node)
    lower, upper = halves(node)
    return add(added_up(lower, values, add), added_up(upper, values, add))


_DIRECT_BYTES = 1 << 14
"""Vectors up to this size are sent to every rank, which is faster than two steps."""


def reduced_in_order(
    call: CollectiveCall, terms: Sequence[Sequence[Array]], op: ReduceOp, shards: int
) -> list[Array]:
    """All-reduce arrays; returns new arrays of the same shapes and dtypes.

    ``terms[i]`` has the i-th array's terms: those of this rank's subtrees, in their
    order. Raises what the methods of ``HostTransport`` raise.
    """
    first = [arrays[0] for arrays in terms]
    results: list[Array] = [np.empty(0)] * len(first)
    for dtype in dict.fromkeys(array.dtype for array in first):
        chosen = [i for i, array in enumerate(first) if array.dtype == dtype]
        packings = [
            packed(arrays, dtype)
            for arrays in zip(*(terms[i] for i in chosen), strict=True)
        ]
        vectors = [vector for vector, _ in packings]
        act = partial(_over_ranks, call.transport, vectors, op, shards)
        total = call.part(sum(vector.nbytes for vector in vectors), act)
        for i, (start, end) in zip(chosen, packings[0][1], strict=True):
            results[i] = total[start:end].reshape(first[i].shape)
    return results


def _over_ranks(
    transport: HostTransport, vectors: Sequence[Array], op: ReduceOp, shards: int
) -> Array:
    """The reduction over all shards, from this rank's reductions of its subtrees.

    All vectors have one length and dtype, equal on all ranks. So has the result, with
    the same bits on all ranks. It may be one of the vectors, which are overwritten.
    """
    size = transport.size
    nodes = [
        subtrees(shards, *shard_bounds(shards, rank, size)) for rank in range(size)
    ]
    vector = vectors[0]
    if size == 1 or not len(vector):
        return vector
    if all(len(subtree) == 1 for subtree in nodes) and size == 2:
        # The sum of two numbers does not depend on their order.
        transport.allreduce(vector, op)
        return vector
    if vector.nbytes * max(map(len, nodes)) <= _DIRECT_BYTES:
        sent = b"".join(part.tobytes() for part in vectors)
        return _in_order(transport.allgather(sent), nodes, vector.dtype, op, shards)
    # Each rank adds up a part of the vector, and sends it to all.
    bounds = [len(vector) * rank // size for rank in range(size + 1)]
    parts = [
        b"".join(whole[start:end].tobytes() for whole in vectors)
        for start, end in pairwise(bounds)
    ]
    own = _in_order(transport.alltoall(parts), nodes, vector.dtype, op, shards)
    for (start, end), data in zip(
        pairwise(bounds), transport.allgather(own.tobytes()), strict=True
    ):
        vector[start:end] = np.frombuffer(data, vector.dtype)
    return vector


def _in_order(
    received: Sequence[bytes],
    nodes: Sequence[Sequence[Node]],
    dtype: np.dtype[Any],
    op: ReduceOp,
    shards: int,
) -> Array:
    """Combine the values of subtrees that the ranks have sent, one by one."""
    by_node: dict[Node, Array] = {}
    for data, theirs in zip(received, nodes, strict=True):
        values = np.frombuffer(data, dtype).reshape(len(theirs), -1)
        by_node.update(zip(theirs, values, strict=True))
    # An overflow is infinite on one machine, too.
    with np.errstate(over="ignore", invalid="ignore"):
        return added_up((0, shards), by_node, UFUNCS[op])
