"""Collective operations on numpy arrays. Each is one exchange of a group.

All ranks have to call the same operations in the same order. They raise what
``Group.exchange`` raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tfcluster.runtime.collective import ragged_collectives
from tfcluster.runtime.collective.adasum import adasum, require_power_of_two
from tfcluster.runtime.collective.buckets import DEFAULT_BYTES, Item, by_size
from tfcluster.runtime.collective.group import CollectiveCall, Group
from tfcluster.runtime.collective.half_precision import (
    is_half_precision,
    reduce_half_precision,
)
from tfcluster.runtime.collective.signature import Signature
from tfcluster.runtime.collective.sparse import Slices, densified, is_dense, of_rows
from tfcluster.runtime.collective.transports.base import Array, ReduceOp
from tfcluster.runtime.net.buffer_pool import ALIGNMENT, Pool

_ALONE_BYTES = 1 << 22
_pool = Pool()


class Check(Protocol):
    """Compares something that should be equal on all ranks, along with an exchange."""

    @property
    def note(self) -> bytes:
        """What this rank sends to the others: eight bytes at most."""
        ...

    def compared(self, notes: Sequence[bytes]) -> None:
        """Called after the exchange with the notes of all ranks, in rank order.

        Notes are padded with zeros to eight bytes. May raise CollectiveError; all ranks
        must then raise it.
        """
        ...


def mean_of_gradients(
    group: Group,
    dense: Sequence[Array],
    sparse: Sequence[Slices],
    *,
    weight: float,
    signature: Signature,
    bucket_bytes: int = DEFAULT_BYTES,
    check: Check | None = None,
) -> tuple[list[Array], list[Slices]]:
    """The weighted mean of the ranks' gradients; returns the dense and the sparse ones.

    The mean is ``sum(weight_r * x_r) / sum(weight_r)``, as in federated averaging
    (McMahan et al., arXiv:1602.05629), where ``weight`` is this rank's number of rows;
    a rank of weight 0 counts as zeros, even if it has NaN. Arrays are float16,
    bfloat16, float32, float64 or complex, of any shape, with equal shapes and dtypes on
    all ranks; results are new arrays of the same. Half precision is summed in float32.
    They are all-reduced in buckets of about ``bucket_bytes`` bytes: see ``buckets``.
    The number of slices may differ between ranks: they are scaled, all-gathered and
    concatenated in rank order, or, where ``is_dense`` says so, all-reduced, and then
    each row comes once. ``check`` compares notes of all ranks along with it.

    Raises what ``Group.exchange`` and ``check.compared`` raise, and IndexError for an
    index beyond ``Slices.rows``; nothing can be exchanged after that.
    """
    if bucket_bytes != DEFAULT_BYTES:
        what = f"{signature.what} (buckets of {bucket_bytes} bytes)"
        signature = Signature(what, signature.tensors)
    note = check.note if check else b""
    with group.exchange(signature, weight, note) as call:
        rest = [_counted(slices, call.share) for slices in sparse]
        indices = [
            ragged_collectives.allgatherv(call.transport, slices.indices)
            for slices in rest
        ]
        whole = {
            i: densified(rest[i], rest[i].rows or 0)
            for i, (_, counts) in enumerate(indices)
            if is_dense(counts.tolist(), rest[i].rows)
        }
        arrays = [*dense, *whole.values()]
        means = _reduce(
            call, arrays, ReduceOp.SUM, scale=call.share, bucket_bytes=bucket_bytes
        )
        sums = dict(zip(whole, means[len(dense) :], strict=True))
        gathered = [
            of_rows(sums[i], found)
            if i in sums
            else Slices(_gathered_values(call, slices), found, slices.rows)
            for i, (slices, (found, _)) in enumerate(zip(rest, indices, strict=True))
        ]
    if check:
        check.compared(call.notes)
    return means[: len(dense)], gathered


def reduce_arrays(
    group: Group, arrays: Sequence[Array], op: ReduceOp, signature: Signature
) -> list[Array]:
    """All-reduce each array by ``op``: SUM, MIN, MAX or PRODUCT.

    Arrays have any shapes and dtypes of numpy's numbers, equal on all ranks; results
    are new arrays of the same shapes and dtypes, bitwise equal on all ranks. Half
    precision is reduced in float32; integers wrap around. Raises what
    ``Group.exchange`` raises, and KeyError for another ``op``.
    """
    with group.exchange(signature) as call:
        return _reduce(call, arrays, op)


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

    Arrays have any shapes and dtypes of numpy's numbers, equal on all ranks; results
    have the same. Slices may differ in their number of rows; theirs are concatenated in
    rank order. The average of integers is rounded down; it does not overflow. float16
    and bfloat16 are summed in float32. ADASUM (``adasum``) is for floats. Raises what
    ``Group.exchange`` raises, and before that NotImplementedError for ADASUM if the
    number of ranks is not a power of two.
    """
    if op is ReduceOp.ADASUM:
        require_power_of_two(group.size)
    with group.exchange(signature) as call:
        if op is ReduceOp.AVERAGE:
            combined = _averaged(call, dense)
        elif op is ReduceOp.ADASUM:
            combined = [_adasummed(call, array) for array in dense]
        else:
            combined = _reduce(call, dense, op)
        return combined, [_gathered(call, slices) for slices in sparse]


def allgather_bytes(
    group: Group, data: bytes, signature: Signature, check: Check | None = None
) -> list[bytes]:
    """All-gather: every rank's data, of any lengths, in rank order.

    Raises what ``Group.exchange`` and ``check.compared`` raise.
    """
    with group.exchange(signature, note=check.note if check else b"") as call:
        found = call.transport.allgather(data)
    if check:
        check.compared(call.notes)
    return found


def broadcast_bytes(
    group: Group, data: bytes, root: int, signature: Signature
) -> bytes:
    """Broadcast: the data of rank ``root``; that of other ranks is ignored.

    Raises what ``Group.exchange`` raises.
    """
    with group.exchange(signature) as call:
        return call.transport.broadcast(data, root)


def meet(group: Group, signature: Signature) -> None:
    """Barrier: return when all ranks have called. Raises like ``Group.exchange``."""
    with group.exchange(signature):
        pass  # Comparing signatures is a barrier already.


def _reduce(
    call: CollectiveCall,
    arrays: Sequence[Array],
    op: ReduceOp,
    *,
    scale: float = 1.0,
    bucket_bytes: int = DEFAULT_BYTES,
) -> list[Array]:
    """All-reduce ``scale`` times the arrays; returns new arrays.

    Small arrays of one dtype are packed into one vector, which is all-reduced bucket by
    bucket. A large array is all-reduced in a call of its own.
    """
    results: list[Array] = [np.empty(0)] * len(arrays)
    alone = [i for i, array in enumerate(arrays) if _goes_alone(array, len(arrays))]
    for i in alone:
        results[i] = _reduced_alone(call, arrays[i], op, scale)
    together = [i for i in range(len(arrays)) if i not in set(alone)]
    for dtype in dict.fromkeys(arrays[i].dtype for i in together):
        chosen = [i for i in together if arrays[i].dtype == dtype]
        half = is_half_precision(dtype)
        vector, bounds = _packed(
            [arrays[i] for i in chosen], dtype, 1.0 if half else scale
        )
        items = [Item(str(dtype), arrays[i].nbytes) for i in chosen]
        for bucket in by_size(items, bucket_bytes):
            piece = vector[bounds[bucket[0]][0] : bounds[bucket[-1]][1]]
            if half:
                # Scaled after the conversion to float32, not in half precision.
                shares = None if scale == 1.0 else _shares(call)
                piece[:] = reduce_half_precision(call.transport, piece, op, shares)
            elif piece.size:
                call.transport.allreduce(piece, op)
        for i, (start, end) in zip(chosen, bounds, strict=True):
            results[i] = vector[start:end].reshape(arrays[i].shape)
    return results


def _goes_alone(array: Array, count: int) -> bool:
    """Whether to reduce this array in a call of its own, without packing it.

    That saves a copy, which for small arrays costs less than another call. All ranks
    decide the same, because they have compared dtypes and shapes.
    """
    large = array.nbytes > _ALONE_BYTES or (count == 1 and array.size > 0)
    return large and not is_half_precision(array.dtype)


def _reduced_alone(
    call: CollectiveCall, array: Array, op: ReduceOp, scale: float
) -> Array:
    total = _pool.empty(array.size, array.dtype)
    source = array.reshape(-1)
    if scale == 0.0:
        source, scale = np.zeros_like(source), 1.0  # Not 0 * x: it may be NaN.
    call.transport.allreduce(total, op, source, scale)
    return total.reshape(array.shape)


def _averaged(call: CollectiveCall, arrays: Sequence[Array]) -> list[Array]:
    """The mean over the ranks, with equal weights."""
    size = call.transport.size
    # Sums of narrow integers could overflow; their averages fit the dtype again.
    wide = [
        array.astype(np.uint64 if array.dtype.kind == "u" else np.int64)
        if array.dtype.kind in "iu"
        else array
        for array in arrays
    ]
    halves = [array for array in wide if is_half_precision(array.dtype)]
    others = [array for array in wide if not is_half_precision(array.dtype)]
    totals = iter(_reduce(call, others, ReduceOp.SUM))
    # All weights are equal in this exchange, so each share is 1 / size.
    half_means = iter(_reduce(call, halves, ReduceOp.SUM, scale=call.share))
    means = []
    for array in arrays:
        if is_half_precision(array.dtype):
            means.append(next(half_means))
            continue
        total = next(totals)
        if array.dtype.kind in "iu":
            means.append((total // total.dtype.type(size)).astype(array.dtype))
        else:
            means.append(np.divide(total, total.dtype.type(size), out=total))
    return means


def _adasummed(call: CollectiveCall, array: Array) -> Array:
    parts = call.transport.allgather(array.tobytes())
    return adasum([np.frombuffer(p, array.dtype).reshape(array.shape) for p in parts])


def _gathered(call: CollectiveCall, slices: Slices) -> Gathered:
    values, counts = ragged_collectives.allgatherv(call.transport, slices.values)
    indices, _ = ragged_collectives.allgatherv(call.transport, slices.indices)
    return Gathered(Slices(values, indices), counts)


def _shares(call: CollectiveCall) -> list[float]:
    """Every rank's fraction of the total weight, in rank order."""
    total = sum(call.weights)
    return [weight / total if total else 0.0 for weight in call.weights]


def _packed(
    arrays: Sequence[Array], dtype: Any, scale: float
) -> tuple[Array, list[tuple[int, int]]]:
    """Pack ``scale`` times the arrays into one vector; also returns each one's bounds.

    The vector is not shared: its parts become the results and may outlive this call.
    Each part is aligned, so that TensorFlow can use it without a copy; the gaps are 0.
    """
    step = max(1, ALIGNMENT // dtype.itemsize)
    starts, length = [], 0
    for array in arrays:
        starts.append(length)
        length += -(-array.size // step) * step
    vector = _pool.empty(starts[-1] + arrays[-1].size, dtype)
    bounds = []
    end = 0
    for array, start in zip(arrays, starts, strict=True):
        vector[end:start] = 0
        end = start + array.size
        part = vector[start:end]
        if scale == 0.0:
            part[:] = 0  # Not 0 * x: it may be NaN.
        elif scale == 1.0:
            part[:] = array.reshape(-1)
        else:
            np.multiply(array.reshape(-1), dtype.type(scale), out=part)
        bounds.append((start, end))
    return vector, bounds


def _counted(slices: Slices, share: float) -> Slices:
    """The slices, without any rows if this rank's share is 0."""
    if share:
        return slices
    return Slices(slices.values[:0], slices.indices[:0], slices.rows)


def _gathered_values(call: CollectiveCall, slices: Slices) -> Array:
    scale = slices.values.dtype.type(call.share)
    return ragged_collectives.allgatherv(call.transport, slices.values * scale)[0]
