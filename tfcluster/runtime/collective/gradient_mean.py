"""The weighted mean of the ranks' gradients, in one exchange.

Between hosts the gradients are exchanged in buckets, in reverse order, which is roughly
the order in which a backward pass computes them. So a bucket can be sent while the next
bucket is being computed; see ``background_exchange``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from tfcluster.runtime.collective import ragged_collectives
from tfcluster.runtime.collective.buckets import (
    DEFAULT_BYTES,
    Bucket,
    Item,
    in_reverse_order,
)
from tfcluster.runtime.collective.collectives import Check
from tfcluster.runtime.collective.group import CollectiveCall, Group
from tfcluster.runtime.collective.half_precision import is_half_precision
from tfcluster.runtime.collective.packing import ALONE_BYTES, packed, pool, reduced
from tfcluster.runtime.collective.rounding import Residuals, Rounding
from tfcluster.runtime.collective.signature import Signature
from tfcluster.runtime.collective.sparse import (
    Slices,
    densified,
    is_dense,
    of_rows,
)
from tfcluster.runtime.collective.sparse_indices import gathered_indices
from tfcluster.runtime.collective.transports.base import Array, ReduceOp

_SENT_AT_ONCE_BYTES = ALONE_BYTES
"""The largest bucket between hosts: the next bucket is computed while it is sent."""


class Gradients(Protocol):
    """This rank's gradients, which may become available one after the other."""

    @property
    def items(self) -> Sequence[Item]:
        """Dtype and size of each dense array; known from the beginning."""
        ...

    @property
    def count(self) -> int:
        """The number of dense arrays."""
        ...

    @property
    def late(self) -> int:
        """The number of dense arrays, at the list's end, that become available last."""
        ...

    def has(self, bucket: Bucket) -> bool:
        """Whether these dense arrays are available."""
        ...

    def dense(self, bucket: Bucket) -> list[Array]:
        """These dense arrays; waits for them.

        Raises CollectiveError if they will not arrive.
        """
        ...

    def sparse(self) -> Sequence[Slices]:
        """The sparse gradients; waits for them.

        Raises CollectiveError if they will not arrive.
        """
        ...


class Available:
    """``Gradients`` that are all available."""

    def __init__(
        self, dense: Sequence[Array], sparse: Sequence[Slices], late: int = 0
    ) -> None:
        self.late = late
        self._dense = dense
        self._sparse = sparse

    @property
    def items(self) -> Sequence[Item]:
        return [Item(str(array.dtype), array.nbytes) for array in self._dense]

    @property
    def count(self) -> int:
        return len(self._dense)

    def has(self, bucket: Bucket) -> bool:
        return True

    def dense(self, bucket: Bucket) -> list[Array]:
        return [self._dense[place] for place in bucket]

    def sparse(self) -> Sequence[Slices]:
        return self._sparse


class Receiver(Protocol):
    """Gets the results of an exchange while it is in progress."""

    def began(self, notes: tuple[bytes, ...]) -> None:
        """Called when all ranks take part; ``notes`` are their notes, in rank order."""
        ...

    def averaged(self, bucket: Bucket, means: Sequence[Array]) -> None:
        """Called with the means of these dense arrays; between hosts only."""
        ...


@dataclass(frozen=True, slots=True)
class MeanOptions:
    """How a mean is exchanged; equal on all ranks.

    ``rounding``, a dtype or None, applies between hosts, to float32 and float64.
    ``residuals`` has this rank's rounding errors, if they are fed back.
    """

    bucket_bytes: int = DEFAULT_BYTES
    rounding: Rounding | None = None
    residuals: Residuals | None = None

    def signature(self, signature: Signature) -> Signature:
        """``signature`` with the options that differ from the defaults."""
        words = []
        if self.bucket_bytes != DEFAULT_BYTES:
            words.append(f"buckets of {self.bucket_bytes} bytes")
        if self.rounding is not None:
            fed_back = "" if self.residuals is None else " with error feedback"
            words.append(f"sent as {self.rounding.dtype}{fed_back}")
        if not words:
            return signature
        return Signature(f"{signature.what} ({', '.join(words)})", signature.tensors)

    def buckets(self, items: Sequence[Item], late: int) -> list[Bucket]:
        """The buckets between hosts, in the order in which they are exchanged.

        Each bucket holds positions of dense arrays. The last ``late`` arrays are in
        separate buckets at the end.
        """
        most = min(self.bucket_bytes, _SENT_AT_ONCE_BYTES)
        early = len(items) - late
        following = in_reverse_order(items[early:], most, ALONE_BYTES)
        return [
            *in_reverse_order(items[:early], most, ALONE_BYTES),
            *(tuple(early + place for place in bucket) for bucket in following),
        ]


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
    """The weighted mean of the ranks' gradients: the dense and the sparse gradients.

    The mean is ``sum(weight_r * x_r) / sum(weight_r)``, as in federated averaging
    (McMahan et al., arXiv:1602.05629), where ``weight`` is this rank's number of rows;
    a rank of weight 0 counts as zeros, even if it has NaN. Arrays are float16,
    bfloat16, float32, float64 or complex, of any shape, with equal shapes and dtypes on
    all ranks; results are new arrays of the same. Half precision is summed in float32.
    They are all-reduced in buckets of about ``bucket_bytes`` bytes: see ``buckets``.
    The number of slices may differ between ranks: they are scaled, all-gathered and
    concatenated in rank order. Where ``is_dense`` says so, they are all-reduced
    instead, and then each row occurs once. If their indices are ``common``, slices are
    added up one by one. ``check`` compares notes of all ranks in the
    same exchange.

    Raises what ``Group.exchange`` and ``check.compared`` raise, and IndexError for an
    index beyond ``Slices.rows``; nothing can be exchanged after that.
    """
    options = MeanOptions(bucket_bytes)
    gradients = Available(dense, sparse)
    signature = options.signature(signature)
    found = mean_of(group, gradients, options, weight, signature, check)
    if check:
        check.compared(found.notes)
    return found.dense, found.sparse


@dataclass(frozen=True, slots=True)
class Means:
    """The result of an exchange: the means, and the notes of all ranks."""

    dense: list[Array]
    sparse: list[Slices]
    notes: tuple[bytes, ...]


def mean_of(
    group: Group,
    gradients: Gradients,
    options: MeanOptions,
    weight: float,
    signature: Signature,
    check: Check | None = None,
    receiver: Receiver | None = None,
) -> Means:
    """Like ``mean_of_gradients``, for arrays that need not be available yet.

    ``signature`` includes the options (``MeanOptions.signature``). This only sends the
    note of ``check``; the caller compares the notes.
    """
    note = check.note if check else b""
    with group.exchange(signature, weight, note) as call:
        if receiver is not None:
            receiver.began(call.notes)
        if call.transport.several_hosts:
            dense = _bucket_means(call, gradients, options, receiver)
            _, gathered = _at_once(call, (), gradients.sparse(), options)
        else:
            own = gradients.dense(tuple(range(gradients.count)))
            dense, gathered = _at_once(call, own, gradients.sparse(), options)
    return Means(dense, gathered, call.notes)


def _at_once(
    call: CollectiveCall,
    dense: Sequence[Array],
    sparse: Sequence[Slices],
    options: MeanOptions,
) -> tuple[list[Array], list[Slices]]:
    rest = [_counted(slices, call.share) for slices in sparse]
    indices = [gathered_indices(call.transport, [slices]) for slices in rest]
    whole = {}
    for i, (slices, found) in enumerate(zip(rest, indices, strict=True)):
        if found.common is not None:
            whole[i] = _values_at(found.common, slices)
        elif is_dense(list(map(len, found.parts)), slices.rows):
            whole[i] = densified(slices, slices.rows or 0)
    arrays = [*dense, *whole.values()]
    means = reduced(
        call,
        arrays,
        ReduceOp.SUM,
        scale=call.share,
        bucket_bytes=options.bucket_bytes,
    )
    sums = dict(zip(whole, means[len(dense) :], strict=True))
    gathered = []
    for i, (slices, found) in enumerate(zip(rest, indices, strict=True)):
        if found.common is not None:
            gathered.append(Slices(sums[i], found.common, slices.rows))
        elif i in sums:
            gathered.append(of_rows(sums[i], found.joined))
        else:
            values = _gathered_values(call, slices)
            gathered.append(Slices(values, found.joined, slices.rows))
    return means[: len(dense)], gathered


def _values_at(indices: Array, slices: Slices) -> Array:
    """This rank's values at the common indices: zeros if it has no rows."""
    if len(slices.indices):
        return slices.values
    return np.zeros((len(indices), *slices.values.shape[1:]), slices.values.dtype)


def _bucket_means(
    call: CollectiveCall,
    gradients: Gradients,
    options: MeanOptions,
    receiver: Receiver | None,
) -> list[Array]:
    """The means of the dense arrays, bucket by bucket as they become available."""
    means: list[Array] = [np.empty(0)] * gradients.count
    buckets = options.buckets(gradients.items, gradients.late)
    for number, bucket in enumerate(buckets):
        # Other ranks that wait for this one must see that it is still computing.
        with nullcontext() if gradients.has(bucket) else call.away():
            arrays = gradients.dense(bucket)
        is_late = bucket[0] >= len(means) - gradients.late
        found = (
            reduced(call, arrays, ReduceOp.SUM, scale=call.share)
            if is_late or options.rounding is None or not _can_be_rounded(arrays)
            else _rounded_means(call, arrays, options, number)
        )
        for place, mean in zip(bucket, found, strict=True):
            means[place] = mean
        if receiver is not None:
            receiver.averaged(bucket, found)
    return means


def _can_be_rounded(arrays: Sequence[Array]) -> bool:
    dtype = arrays[0].dtype  # All have the same.
    return dtype.kind == "f" and not is_half_precision(dtype)


def _rounded_means(
    call: CollectiveCall, arrays: Sequence[Array], options: MeanOptions, number: int
) -> list[Array]:
    """The means of a bucket of float32 or float64, rounded between hosts."""
    assert options.rounding is not None
    kept = options.residuals
    residual = None if kept is None else kept.of(number)
    if len(arrays) == 1:
        source = arrays[0].reshape(-1)
        total = pool.empty(source.size, source.dtype)
        bounds = [(0, source.size)]
    else:
        total, bounds = packed(arrays, arrays[0].dtype)
        source = total
    if total.size:
        act = partial(
            call.transport.allreduce_rounded,
            total,
            source,
            call.shares,
            options.rounding,
            residual,
        )
        call.part(total.nbytes, act)
    return [
        total[start:end].reshape(array.shape)
        for array, (start, end) in zip(arrays, bounds, strict=True)
    ]


def _counted(slices: Slices, share: float) -> Slices:
    """The slices, without any rows if this rank's share is 0."""
    if share:
        return slices
    return Slices(slices.values[:0], slices.indices[:0], slices.rows)


def _gathered_values(call: CollectiveCall, slices: Slices) -> Array:
    scale = slices.values.dtype.type(call.share)
    return ragged_collectives.allgatherv(call.transport, slices.values * scale)[0]
