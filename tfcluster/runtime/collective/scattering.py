"""Reduce-scatter and all-gather of many arrays within one exchange: packed first.

Only for a transport that ``scatters``. Every rank calls these within an exchange of its
group. All ranks know the shapes of the parts of all ranks; dtypes are equal on all
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from tfcluster.runtime.collective.packing import (
    ALONE_BYTES,
    CollectiveCall,
    pool,
)
from tfcluster.runtime.collective.transports.base import Array, ReduceOp
from tfcluster.runtime.net.buffer_pool import ALIGNMENT

Sizes = tuple[int, ...]
"""The shape of an array."""


def reduce_scattered(
    call: CollectiveCall, parts: Sequence[Sequence[Array]], op: ReduceOp
) -> list[Array]:
    """This rank's parts of the reduced arrays, with the bits of an all-reduce.

    ``parts[r]`` are the terms of what rank r gets, in the same order for all ranks.
    Their dtypes are not of half precision. Returns new arrays of the shapes of this
    rank's parts. Raises what the transport raises.
    """
    own, order = parts[call.transport.rank], call.transport.scatter_order
    results: list[Array] = [np.empty(0)] * len(own)
    for dtype, places in _by_dtype(own).items():
        bounds = _bounds([[parts[rank][i].size for i in places] for rank in order])
        vector = pool.empty(bounds[-1], dtype)
        terms = [parts[rank][i].reshape(-1) for rank in order for i in places]
        np.concatenate(terms, out=vector)
        act = partial(call.transport.reduce_scatter, vector, op, bounds, vector)
        # A copy, not to keep the memory of all other parts.
        total = call.part(vector.nbytes, act).copy()
        arrays = _unpacked(total, [own[i].shape for i in places])
        for place, array in zip(places, arrays, strict=True):
            results[place] = array
    return results


def reduce_scattered_alone(
    call: CollectiveCall, term: Array, sizes: Sequence[int], op: ReduceOp
) -> Array:
    """This rank's part of one reduced array, as ``reduce_scattered``: shape (n,).

    Rank r gets ``sizes[r]`` successive elements. Raises what the transport raises.
    """
    bounds = [0, *accumulate(sizes)]
    vector = _new(bounds[-1], term.dtype, bounds[call.transport.rank])
    source = term.reshape(-1)
    act = partial(call.transport.reduce_scatter, source, op, bounds, vector)
    return call.part(vector.nbytes, act)


def allgathered(
    call: CollectiveCall, own: Sequence[Array], shapes: Sequence[Sequence[Sizes]]
) -> list[list[Array]]:
    """The parts that each rank has of several arrays, in rank order.

    This rank has ``own``; rank r has arrays of ``shapes[r]``. Raises what the transport
    raises.
    """
    order = call.transport.scatter_order
    mine = order.index(call.transport.rank)
    results = [[np.empty(0)] * len(own) for _ in shapes]
    for dtype, places in _by_dtype(own).items():
        chosen = [[shapes[rank][i] for i in places] for rank in order]
        bounds = _bounds([[math.prod(shape) for shape in part] for part in chosen])
        vector = pool.empty(bounds[-1], dtype)
        start, end = bounds[mine], bounds[mine + 1]
        np.concatenate([own[i].reshape(-1) for i in places], out=vector[start:end])
        _gather(call, vector, bounds, mine)
        ranks = zip(order, chosen, pairwise(bounds), strict=True)
        for rank, part_shapes, (first, last) in ranks:
            arrays = _unpacked(vector[first:last], part_shapes)
            for place, array in zip(places, arrays, strict=True):
                results[rank][place] = array
    return results


def allgathered_alone(call: CollectiveCall, own: Array, sizes: Sequence[int]) -> Array:
    """The elements of all ranks' parts of one array, in rank order: shape (n,).

    Rank r has ``sizes[r]`` of them; the transport's ``scatter_order`` is the ranks'.
    Raises what the transport raises.
    """
    bounds, rank = [0, *accumulate(sizes)], call.transport.rank
    vector = pool.empty(bounds[-1], own.dtype)
    vector[bounds[rank] : bounds[rank + 1]] = own.reshape(-1)
    _gather(call, vector, bounds, rank)
    return vector


def can_go_alone(call: CollectiveCall, nbytes: int) -> bool:
    """Whether a large array is better scattered and gathered alone, without a copy."""
    if nbytes <= ALONE_BYTES:
        return False
    order = call.transport.scatter_order
    return list(order) == sorted(order)


def _new(count: int, dtype: np.dtype[Any], start: int) -> Array:
    """A vector, aligned from ``start`` on, so that TensorFlow need not copy that part.

    Of new memory, only what is written is used.
    """
    memory = np.empty(count * dtype.itemsize + ALIGNMENT, np.uint8)
    gap = -(memory.ctypes.data + start * dtype.itemsize) % ALIGNMENT
    return memory[gap : gap + count * dtype.itemsize].view(dtype)


def _gather(
    call: CollectiveCall, vector: Array, bounds: Sequence[int], place: int
) -> None:
    nbytes = (bounds[place + 1] - bounds[place]) * vector.itemsize
    call.part(nbytes, partial(call.transport.allgather_shards, vector, bounds))


def _by_dtype(arrays: Sequence[Array]) -> dict[np.dtype[Any], list[int]]:
    """The places of the arrays of each dtype."""
    places: dict[np.dtype[Any], list[int]] = {}
    for index, array in enumerate(arrays):
        places.setdefault(array.dtype, []).append(index)
    return places


def _bounds(sizes: Sequence[Sequence[int]]) -> list[int]:
    """The bounds of the ranks' parts of a vector, given the sizes of their arrays."""
    return [0, *accumulate(map(sum, sizes))]


def _unpacked(vector: Array, shapes: Sequence[Sizes]) -> list[Array]:
    ends = [0, *accumulate(map(math.prod, shapes))]
    pieces = zip(pairwise(ends), shapes, strict=True)
    return [vector[start:end].reshape(shape) for (start, end), shape in pieces]
