"""What ranks exchange in a program, and the host's way to do it.

An exchange is one op, which calls Python. It carries several tensors at once: sums,
maxima and minima over the ranks, and tensors of which every rank has its rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tfcluster.runtime.collective import Group, ReduceOp, Signature, tensor_words
from tfcluster.runtime.collective.packing import (
    CollectiveCall,
    SmallReduction,
    packed,
    reduced,
)
from tfcluster.runtime.collective.rounding import (
    Residual,
    Rounding,
    is_half_precision,
)
from tfcluster.runtime.collective.scattering import (
    allgathered,
    allgathered_alone,
    can_go_alone,
    reduce_scattered,
    reduce_scattered_alone,
)
from tfcluster.runtime.collective.shard_sums import reduced_in_order
from tfcluster.runtime.partition.graph import Node, sizes_of
from tfcluster.runtime.partition.host_rows import gathered, joined, rows_of
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    ByOwner,
    Partial,
    Replicate,
    Shape,
    Shard,
    Split,
)
from tfcluster.runtime.partition.row_owners import (
    Trip,
    exchanged,
    from_owners,
    ids_to_owners,
    to_owners,
)
from tfcluster.runtime.partition.tf_functions import HostFunction
from tfcluster.runtime.partition.writer import OpWriter, Ref
from tfcluster.runtime.tensor_types import Array

_GRADIENT = "gradient_tape/"
"""In the names of ops that compute gradients."""
_ROUNDED = (np.dtype(np.float32), np.dtype(np.float64))
_OPS = {"sum": ReduceOp.SUM, "max": ReduceOp.MAX, "min": ReduceOp.MIN}


@dataclass(frozen=True, slots=True)
class ExchangeRequest:
    """A tensor that every rank needs whole, and what this rank has of it."""

    ref: Ref
    placement: Partial | Shard | ByOwner
    shape: Shape | None
    """The shape of the whole tensor."""
    name: str
    rows: int | None = None
    """The number of rows of the batch, over all ranks."""
    others: tuple[Ref, ...] = ()
    """More terms, if the process has several ranks; see ``Ranks.nodes``."""
    result: Replicate | Shard | ByOwner = REPLICATE
    """What the rank gets: a piece only of a sum, from an exchanger that ``scatters``,
    or of what is ``is_routed``."""
    ids: tuple[Ref, ...] = ()
    """For what is routed: the rank's part of the indices, and then what it got as their
    owner, if anything was sent yet."""

    @property
    def terms(self) -> tuple[Ref, ...]:
        """All that this process has of the tensor."""
        return self.ref, *self.others

    @property
    def is_routed(self) -> bool:
        """Whether it goes to the ranks that have the rows of a variable, or back."""
        return isinstance(self.placement, ByOwner) or isinstance(self.result, ByOwner)


BUCKET_BYTES = 8 << 20
"""The size above which reductions are split into several exchanges, so that the first
go while the last terms are computed."""


IN_ORDER = "tfcluster_in_order"
"""In the names of the program's ops that wait for the other ranks, as exchanges do."""


def is_in_order(node: Node) -> bool:
    """Whether an op waits for the other ranks."""
    return node.type == "PyFunc" and IN_ORDER in node.name


class Exchanger(Protocol):
    """Writes the exchanges between the processes."""

    @property
    def bucket_bytes(self) -> int:
        """The size above which reductions are split into several exchanges."""

    @property
    def scatters(self) -> bool:
        """Whether it can give each rank its piece of a sum."""

    @property
    def words(self) -> Sequence[str]:
        """What is exchanged, in words that ranks compare before the program runs.

        Empty if each exchange compares its own.
        """

    def write(self, writer: OpWriter, requests: Sequence[ExchangeRequest]) -> list[Ref]:
        """Write one exchange; returns the results, in order.

        The op that ends the exchange is then ``writer.last``.
        """


class HostExchanger:
    """Exchanges by calls of a function on the host.

    ``program`` says in signatures which program exchanges: ranks with different
    programs get an error instead of a wrong sum. With ``rounding``, gradients are
    rounded between hosts; ``feeds_back`` adds what that removes to the next ones.

    With ``ranks``, there are that many in all, and each process has some of them. Sums
    then have the same bits whichever ranks each process has; see ``Ranks.ordered``.
    """

    words = ()

    def __init__(
        self,
        group: Group,
        program: str,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        rounding: Rounding | None = None,
        feeds_back: bool = False,
        ranks: int | None = None,
    ) -> None:
        self.bucket_bytes = min(bucket_bytes, BUCKET_BYTES)
        self._group = group
        self._program = program
        self._rounding = rounding
        self._feeds_back = feeds_back
        self._ranks = ranks
        self.scatters = ranks is None
        self._functions: list[HostFunction] = []
        """They must live as long as the ops that call them."""

    def write(self, writer: OpWriter, requests: Sequence[ExchangeRequest]) -> list[Ref]:
        """See ``Exchanger``."""
        what = f"exchange {len(self._functions) + 1} of {self._program}"
        exchange = _HostExchange(
            self._group,
            what,
            requests,
            self._rounding,
            [Residual() for _ in _ROUNDED] if self._feeds_back else None,
            self._ranks,
        )
        function = HostFunction(exchange)
        self._functions.append(function)
        dtypes = [request.ref.dtype for request in requests]
        return writer.op(
            "PyFunc",
            [[ref for request in requests for ref in (*request.terms, *request.ids)]],
            {"token": function.token, "Tout": dtypes},
            "exchange",
        )


class _HostExchange:
    """One exchange of a program: the function that its op calls."""

    def __init__(
        self,
        group: Group,
        what: str,
        requests: Sequence[ExchangeRequest],
        rounding: Rounding | None,
        residuals: Sequence[Residual] | None,
        ranks: int | None,
    ) -> None:
        self._group = group
        self._requests = requests
        self._rounding = rounding
        self._residuals = residuals
        self._ranks = ranks
        # Processes may have different numbers of terms, so these are no part of it.
        self._signature = Signature(what, words_of(requests))
        self._rounded = [i for i, each in enumerate(requests) if _may_be_rounded(each)]
        self._small: tuple[list[int], SmallReduction | None] | None = None
        """Which tensors travel with the header."""

    def __call__(self, *arrays: Array) -> list[Array]:
        """The results for the ``terms`` and ``ids`` of all requests."""
        requests, rounding = self._requests, self._rounding
        if self._small is None:
            # Not before: now that all ranks run the program, they are connected.
            self._small = self._chosen_small(self._group.transport.small_bytes)
        small_places, small = self._small
        rest = iter(arrays)
        counts = [len((*request.terms, *request.ids)) for request in requests]
        terms = [list(itertools.islice(rest, count)) for count in counts]
        own = [numbers(terms[i][0]) for i in small_places]
        data = b"" if small is None else small.packed(own)
        wholes: dict[int, Array] = {}
        pieces: dict[int, Array] = {}
        with self._group.exchange(self._signature, data=data) as call:
            if small is not None:
                wholes = dict(zip(small_places, small.results(call, own), strict=True))
            if len(wholes) < len(requests):
                if rounding is not None and call.transport.several_hosts:
                    given = arrays, self._rounded, rounding, self._residuals
                    wholes |= _rounded(call, *given)
                pieces = self._others(call, terms, wholes)
        for i, whole in wholes.items():
            wholes[i] = whole.astype(terms[i][0].dtype, copy=False)
        return self._finished(wholes, pieces)

    def _others(
        self,
        call: CollectiveCall,
        terms: Sequence[list[Array]],
        wholes: dict[int, Array],
    ) -> dict[int, Array]:
        """Add the tensors that are not among the ``wholes``; returns pieces of others.

        All ranks have the same of them, so they make the same calls.
        """
        requests = self._requests
        places = [i for i in range(len(requests)) if i not in wholes]
        pieces: dict[int, Array] = {}
        if call.transport.scatters and self._ranks is None:
            first = [of_request[0] for of_request in terms]
            pieces = _scattered(call, requests, places, first)
            wholes |= _gathered_together(call, requests, first)
        pieces |= _routed(call, requests, terms)
        places = [i for i in places if i not in wholes and i not in pieces]
        for i in places:
            placement = requests[i].placement
            if isinstance(placement, Shard):
                wholes[i] = gathered(call.transport, terms[i][0], placement)
        for name, op in _OPS.items():
            chosen = [i for i in places if requests[i].placement == Partial(name)]
            operands = [[numbers(term) for term in terms[i]] for i in chosen]
            results = self._reduced(call, operands, op)
            wholes |= zip(chosen, results, strict=True)
        return pieces

    def _finished(
        self, wholes: Mapping[int, Array], pieces: Mapping[int, Array]
    ) -> list[Array]:
        """What the rank gets: pieces that are there, wholes, or its rows of wholes."""
        split = Split(self._group.rank, self._group.size)
        results = []
        for i, request in enumerate(self._requests):
            result = pieces[i] if i in pieces else wholes[i]
            if isinstance(request.result, Shard) and i not in pieces:
                result = rows_of(result, request.result, split)
            results.append(np.asarray(result, order="C"))
        return results

    def _chosen_small(self, most_bytes: int) -> tuple[list[int], SmallReduction | None]:
        """The tensors that travel with the header; as many as fit, the smallest first.

        They are the same on all ranks.
        """
        if self._ranks is not None or self._rounding is not None:
            return [], None
        kinds: dict[int, tuple[np.dtype[Any], ReduceOp]] = {}
        sizes: dict[int, int] = {}
        for i, request in enumerate(self._requests):
            placement, shape = request.placement, sizes_of(request.shape)
            if not isinstance(placement, Partial) or request.is_routed or shape is None:
                continue
            dtype = np.dtype(request.ref.dtype.as_numpy_dtype)
            dtype = np.dtype(np.uint8) if dtype == np.bool_ else dtype
            if not is_half_precision(dtype) and 0 not in shape:
                kinds[i] = dtype, _OPS[placement.op]
                sizes[i] = dtype.itemsize * math.prod(shape)
        by_size = sorted(kinds, key=lambda i: sizes[i])
        ends = itertools.accumulate(sizes[i] for i in by_size)
        fit = sum(end <= most_bytes for end in ends)
        places = sorted(by_size[:fit])
        return places, SmallReduction([kinds[i] for i in places]) if places else None

    def _reduced(
        self, call: CollectiveCall, terms: Sequence[list[Array]], op: ReduceOp
    ) -> list[Array]:
        if self._ranks is not None:
            return reduced_in_order(call, terms, op, self._ranks)
        return reduced(call, [only for (only,) in terms], op)


def _may_be_rounded(request: ExchangeRequest) -> bool:
    return (
        request.placement == Partial("sum")
        and _GRADIENT in request.name
        and request.ref.dtype.as_numpy_dtype in _ROUNDED
    )


def _rounded(
    call: CollectiveCall,
    arrays: Sequence[Array],
    places: Sequence[int],
    rounding: Rounding,
    residuals: Sequence[Residual] | None,
) -> dict[int, Array]:
    """The sums of these arrays, rounded between hosts."""
    results = {}
    for number, dtype in enumerate(_ROUNDED):
        chosen = [i for i in places if arrays[i].dtype == dtype and arrays[i].size]
        if not chosen:
            continue
        total, bounds = packed([arrays[i] for i in chosen], dtype)
        residual = None if residuals is None else residuals[number]
        call.transport.allreduce_rounded(total, rounding, residual)
        for i, (start, end) in zip(chosen, bounds, strict=True):
            results[i] = total[start:end].reshape(arrays[i].shape)
    return results


def _scattered(
    call: CollectiveCall,
    requests: Sequence[ExchangeRequest],
    places: Sequence[int],
    terms: Sequence[Array],
) -> dict[int, Array]:
    """This rank's pieces of the sums of which each rank gets a piece."""
    places = [
        i
        for i in places
        if isinstance(requests[i].result, Shard)
        and not requests[i].is_routed
        and not is_half_precision(terms[i].dtype)
    ]
    size = call.transport.size
    results: dict[int, Array] = {}
    together: list[int] = []
    parts: list[list[Array]] = [[] for _ in range(size)]
    for i in places:
        shard, term = requests[i].result, terms[i]
        assert isinstance(shard, Shard)
        own = [rows_of(term, shard, Split(rank, size)) for rank in range(size)]
        if _is_in_order(shard, term.shape) and can_go_alone(call, term.nbytes):
            sizes = [part.size for part in own]
            rows = reduce_scattered_alone(call, term, sizes, ReduceOp.SUM)
            results[i] = rows.reshape(own[call.transport.rank].shape)
            continue
        together.append(i)
        for of_rank, part in zip(parts, own, strict=True):
            of_rank.append(part)
    pieces = reduce_scattered(call, parts, ReduceOp.SUM)
    return {**results, **dict(zip(together, pieces, strict=True))}


def _is_in_order(shard: Shard, shape: Sequence[int]) -> bool:
    """Whether the rows of all ranks, one after the other, are the tensor."""
    return math.prod(shape[: shard.dim]) * shard.outer == 1


def _routed(
    call: CollectiveCall,
    requests: Sequence[ExchangeRequest],
    terms: Sequence[Sequence[Array]],
) -> dict[int, Array]:
    """What this rank gets of entries that go to those who have rows, or back."""
    places = [i for i, request in enumerate(requests) if request.is_routed]
    size = call.transport.size
    trips = [_trip(requests[i], size, *terms[i]) for i in places]
    results = exchanged(call.transport, trips) if trips else []
    return dict(zip(places, results, strict=True))


def _trip(
    request: ExchangeRequest,
    size: int,
    own: Array,
    ids: Array,
    route: Array | None = None,
) -> Trip:
    if isinstance(request.placement, ByOwner):
        assert route is not None
        return from_owners(own, ids, route, request.placement.rows, size)
    assert isinstance(request.result, ByOwner)
    if route is None:
        return ids_to_owners(ids, request.result.rows, request.result.home, size)
    return to_owners(own, ids, route, request.result.rows, size)


def _gathered_together(
    call: CollectiveCall, requests: Sequence[ExchangeRequest], arrays: Sequence[Array]
) -> dict[int, Array]:
    """The whole tensors of which ranks have rows, and whose sizes are known."""
    splits = [Split(rank, call.transport.size) for rank in range(call.transport.size)]
    results: dict[int, Array] = {}
    together: dict[int, Shard] = {}
    shapes: list[list[tuple[int, ...]]] = [[] for _ in splits]
    for i, request in enumerate(requests):
        shape, shard, own = sizes_of(request.shape), request.placement, arrays[i]
        if shape is None or not isinstance(shard, Shard) or own.dtype == np.object_:
            continue
        if request.is_routed:
            continue
        parts = [sizes_of(split.local_shape(shape, shard)) or () for split in splits]
        nbytes = math.prod(shape) * own.itemsize
        if _is_in_order(shard, shape) and can_go_alone(call, nbytes):
            rows = allgathered_alone(call, own, [math.prod(part) for part in parts])
            results[i] = rows.reshape(shape)
            continue
        together[i] = shard
        for of_rank, part in zip(shapes, parts, strict=True):
            of_rank.append(part)
    of_ranks = allgathered(call, [arrays[i] for i in together], shapes)
    for number, (i, shard) in enumerate(together.items()):
        results[i] = joined([parts[number] for parts in of_ranks], shard)
    return results


def words_of(requests: Sequence[ExchangeRequest]) -> tuple[str, ...]:
    """The words for these tensors in a ``Signature``."""
    return tuple(
        tensor_words(
            f"{request.name} {request.placement}",
            request.ref.dtype.name,
            request.shape or (),
        )
        for request in requests
    )


def numbers(array: Array) -> Array:
    """The array in a dtype that can be reduced: booleans become integers."""
    return array.astype(np.uint8) if array.dtype == np.bool_ else array
