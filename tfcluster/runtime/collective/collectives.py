"""Collective operations on numpy arrays. Each is one exchange of a group.

All ranks have to call the same operations in the same order. They raise what
``Group.exchange`` raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tfcluster.runtime.collective import ragged_collectives
from tfcluster.runtime.collective.adasum import adasum, require_power_of_two
from tfcluster.runtime.collective.collective_call import CollectiveCall
from tfcluster.runtime.collective.group import Group
from tfcluster.runtime.collective.packing import reduced
from tfcluster.runtime.collective.signature import Signature
from tfcluster.runtime.collective.sparse import Slices
from tfcluster.runtime.collective.transports.base import Array, ReduceOp


def reduce_arrays(
    group: Group, arrays: Sequence[Array], op: ReduceOp, signature: Signature
) -> list[Array]:
    """All-reduce each array by ``op``, which is not ADASUM.

    Arrays have any shapes and numeric numpy dtypes, equal on all ranks; results are new
    arrays of the same shapes and dtypes, bitwise equal on all ranks. Half precision is
    reduced in float32; integers wrap around. Raises what ``Group.exchange`` raises, and
    KeyError for another ``op``.
    """
    with group.exchange(signature) as call:
        return reduced(call, arrays, op)


@dataclass(frozen=True, slots=True)
class Gathered:
    """The ranks' slices, concatenated in rank order, and the row count of each rank.

    ``counts`` is int64 of shape (ranks,).
    """

    slices: Slices
    counts: Array


def combine(
    group: Group,
    dense: Sequence[Array],
    sparse: Sequence[Slices],
    op: ReduceOp,
    signature: Signature,
) -> tuple[list[Array], list[Gathered]]:
    """All-reduce each dense array by ``op``, and all-gather the slices unscaled.

    Arrays have any shapes and numeric numpy dtypes, equal on all ranks; results have
    the same shapes and dtypes. The slices' numbers of rows may differ; the rows are
    concatenated in rank order. The average of integers is rounded down; it does not
    overflow. float16 and bfloat16 are summed in float32. ADASUM (``adasum``) is for
    floats. Raises what ``Group.exchange`` raises, and before that NotImplementedError
    for ADASUM if the number of ranks is not a power of two.
    """
    if op is ReduceOp.ADASUM:
        require_power_of_two(group.size)
    with group.exchange(signature) as call:
        if op is ReduceOp.ADASUM:
            combined = [_adasummed(call, array) for array in dense]
        else:
            combined = reduced(call, dense, op)
        return combined, [_gathered(call, slices) for slices in sparse]


def allgather_bytes(group: Group, data: bytes, signature: Signature) -> list[bytes]:
    """All-gather: every rank's data, of any length, in rank order.

    Raises what ``Group.exchange`` raises.
    """
    with group.exchange(signature) as call:
        return call.transport.allgather(data)


def broadcast_bytes(
    group: Group, data: bytes, root: int, signature: Signature
) -> bytes:
    """Broadcast: the data of rank ``root``; the data of other ranks is ignored.

    Raises what ``Group.exchange`` raises.
    """
    with group.exchange(signature) as call:
        return call.transport.broadcast(data, root)


def meet(group: Group, signature: Signature) -> None:
    """Barrier: return when all ranks have called. Raises like ``Group.exchange``."""
    with group.exchange(signature):
        pass  # Comparing signatures is already a barrier.


def _adasummed(call: CollectiveCall, array: Array) -> Array:
    parts = call.transport.allgather(array.tobytes())
    return adasum([np.frombuffer(p, array.dtype).reshape(array.shape) for p in parts])


def _gathered(call: CollectiveCall, slices: Slices) -> Gathered:
    values, counts = ragged_collectives.allgatherv(call.transport, slices.values)
    indices, _ = ragged_collectives.allgatherv(call.transport, slices.indices)
    return Gathered(Slices(values, indices), counts)
