"""The fixed binary tree in which the values of shards are added up. Pure.

Floating-point addition is not associative, so the order of the additions decides the
last bits of a sum. Here the order depends only on the number of shards, not on which
rank has which shard: the sum of shards [first, last) is the sum of their lower and
their upper half. A rank adds up the largest subtrees that it has completely, and then
the ranks add up these sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

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


def added_up(node: Node, known: Mapping[Node, T], add: Callable[[T, T], T]) -> T:
    """The value of a node, given the values of subtrees that together cover it.

    ``add(lower, upper)`` adds the values of two halves. Raises KeyError if the known
    subtrees do not cover the node.
    """
    found = known.get(node)
    if found is not None:
        return found
    if node[1] - node[0] < 2:
        raise KeyError(node)
    lower, upper = halves(node)
    return add(added_up(lower, known, add), added_up(upper, known, add))
