"""Collective operations on numpy arrays. Each is one exchange of a group.

All ranks have to call the same operations in the same order. They raise what
``Group.exchange`` raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from tfcluster.runtime.collective.group import Group
from tfcluster.runtime.collective.packing import (
    CollectiveCall,
    SmallReduction,
    allgatherv,
    reduced,
)
from tfcluster.runtime.collective.signature import Signature
from tfcluster.runtime.collective.transports.base import Array, ReduceOp, Slices


def reduce_arrays(
    group: Group, arrays: Sequence[Array], op: ReduceOp, signature: Signature
) -> list[Array]:
    """All-reduce each array by ``op``, which is not ADASUM.

    Arrays have any shapes and numeric numpy dtypes, equal on all ranks; results are new
    arrays of the same shapes and dtypes, bitwise equal on all ranks. Half precision is
    reduced in float32; integers wrap around. Raises what ``Group.exchange`` raises, and
    KeyError for another ``op``.
    """
    with _reducing(group, arrays, op, signature) as (_, results):
        return results


@contextmanager
def _reducing(
    group: Group, arrays: Sequence[Array], op: ReduceOp, signature: Signature
) -> Iterator[tuple[CollectiveCall, list[Array]]]:
    """An exchange that begins with the reduction of these arrays."""
    small = _small_reduction(arrays, op)
    if small is None:
        with group.exchange(signature) as call:
            yield call, reduced(call, arrays, op)
        return
    with group.exchange(signature, data=small.packed(arrays)) as call:
        results = small.results(call, arrays)
        if op is ReduceOp.AVERAGE:
            for total in results:
                np.divide(total, total.dtype.type(group.size), out=total)
        yield call, results


def _small_reduction(arrays: Sequence[Array], op: ReduceOp) -> SmallReduction | None:
    """The reduction of arrays that are small, and need no other number type."""
    numeric = "fc" if op is ReduceOp.AVERAGE else "fciu"
    if any(array.dtype.kind not in numeric for array in arrays):
        return None
    op = ReduceOp.SUM if op is ReduceOp.AVERAGE else op
    kinds = [(array.dtype, op) for array in arrays]
    return SmallReduction.of(kinds, [array.size for array in arrays])


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
            combined = [_adasummed(call, array) for array in dense]
            return combined, [_gathered(call, slices) for slices in sparse]
    with _reducing(group, dense, op, signature) as (call, results):
        return results, [_gathered(call, slices) for slices in sparse]


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
    values, counts = allgatherv(call.transport, slices.values)
    indices, _ = allgatherv(call.transport, slices.indices)
    return Gathered(Slices(values, indices), counts)


# --- Adasum ---------------------------------------------------------------------------


def adasum(parts: Sequence[Array]) -> Array:
    """Combine the arrays of all ranks: neighbours in pairs, then pairs of pairs.

    Where gradients agree on a direction their sum is too large a step, and where they
    are orthogonal their average is too small; Adasum lies in between.

    ``parts`` are in rank order, floats of any shape, equal like the dtype; the result
    is a new array of that shape and dtype. Computed in float32 at least, dot products
    in float64. It is identical on all ranks, since each computes it from the same
    arrays. It is algorithm 1 of Maleki et al., arXiv:2006.02924, with the whole array
    as one layer. The number of ranks must be a power of two.
    """
    dtype = parts[0].dtype
    wide = [part.astype(np.promote_types(dtype, np.float32)) for part in parts]
    while len(wide) > 1:
        wide = [_pair(*wide[i : i + 2]) for i in range(0, len(wide), 2)]
    return wide[0].astype(dtype)


def require_power_of_two(ranks: int) -> None:
    """Raise NotImplementedError if Adasum cannot combine this number of ranks."""
    if ranks & (ranks - 1):
        raise NotImplementedError(
            "Adasum combines ranks in pairs: their number must be a power of two, not "
            f"{ranks}"
        )


def _pair(one: Array, other: Array) -> Array:
    a, b = one.reshape(-1).astype(np.float64), other.reshape(-1).astype(np.float64)
    common = float(a @ b)
    return (
        one * _share(common, float(a @ a)) + other * _share(common, float(b @ b))
    ).astype(one.dtype)


def _share(common: float, own: float) -> float:
    """The factor 1 - (a.b) / (2 a.a) of one vector in the combination of two."""
    return 1.0 - common / (2.0 * own) if own else 1.0
