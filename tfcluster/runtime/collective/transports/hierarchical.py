"""The ``host`` transport: shared memory within a host, TCP between hosts.

It uses plain Python and numpy. Small data go to every rank. The all-reduce of a large
vector is hierarchical: a reduce-scatter within each host, an all-reduce of every shard
between the hosts, and an all-gather within each host. Connections are made on first
use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from tfcluster.runtime.collective.float_coding import Coder, Trials
from tfcluster.runtime.collective.rounding import Residual, Rounding
from tfcluster.runtime.collective.transports.base import (
    UFUNCS,
    Array,
    ReduceOp,
)
from tfcluster.runtime.collective.transports.direct_sum import (
    DirectSum,
    PlainTerms,
    RoundedTerms,
    Terms,
    gathering,
)
from tfcluster.runtime.collective.transports.multiplexed_sockets import (
    IncomingBytes,
    OutgoingBytes,
    PeerSockets,
    framed,
)
from tfcluster.runtime.collective.transports.shm_allreduce import (
    ShmCollectives,
    even_bounds,
)
from tfcluster.runtime.collective.transports.topology import Groups, share_memory
from tfcluster.runtime.net.rendezvous import Member, connect

TIMEOUT_S = 1800.0
"""A rank may well be silent while it saves a model or compiles a step."""

DIRECT_BYTES = 1 << 14
"""Every rank reduces a vector up to this size itself, which takes one step only."""
_PAIR_BYTES = 1 << 18
"""The same for two hosts with a rank each: they send no more bytes that way."""
_PAIR = 2


class HostTransport:
    """Collective operations on raw data.

    ``addresses`` are ``host:port``, in rank order. Every rank has to make the same
    calls in the same order, which ``group`` ensures. They raise PeerLostError if a rank
    is gone, CollectiveTimeoutError if a rank is late, and CollectiveError if the ranks
    cannot be connected; after that only ``close`` may be called. One thread at a time
    makes them; any thread may use ``waiting_for``, ``waited_s``, ``exchanged_bytes``
    and ``interrupt``.

    Ranks with equal ``host_key`` share memory; "" means that the rank shares it with no
    other rank, and None that the key is detected. Connecting fails after ``timeout_s``
    seconds, and so does an operation without progress. The hierarchy is the same as in
    Horovod's ``NCCLHierarchicalAllreduce`` (horovod/common/ops/nccl_operations.cc).
    Transports that send large vectors by other means are subclasses.
    """

    def __init__(
        self,
        me: Member,
        addresses: Sequence[str],
        *,
        timeout_s: float = TIMEOUT_S,
        host_key: str | None = None,
    ) -> None:
        self._me = me
        self._addresses = tuple(addresses)
        self.timeout_s = timeout_s
        self._host_key = host_key
        self._interrupted = threading.Event()
        self._sockets: PeerSockets | None = None
        self._local: ShmCollectives | None = None
        self._groups: Groups = ((me.rank,),) if me.size == 1 else ()
        self._exchanged_bytes = 0
        self._elsewhere = False
        self._coder, self._trials = Coder(), Trials()

    @property
    def rank(self) -> int:
        """This process's number among the ranks."""
        return self._me.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._me.size

    @property
    def several_hosts(self) -> bool:
        """Whether large vectors go through a network that this transport drives itself.

        Only in that case does ``allreduce_rounded`` round. Equal on all ranks; False
        until connected.
        """
        return len(self._groups) > 1

    @property
    def small_bytes(self) -> int:
        """Arrays up to this size in all are best sent to every rank, to reduce them.

        Equal on all ranks, once they are connected.
        """
        is_pair = self.size == len(self._groups) == _PAIR
        return _PAIR_BYTES if is_pair else DIRECT_BYTES

    @property
    def waited_s(self) -> float:
        """Seconds this rank has spent waiting for other ranks so far."""
        waited_s = self._sockets.waited_s if self._sockets else 0.0
        return waited_s + (self._local.progress.waited_s if self._local else 0.0)

    @property
    def waiting_for(self) -> tuple[int, ...]:
        """The ranks for which this one is waiting; first those of this host."""
        if self._elsewhere:  # Other libraries do not say which rank is late.
            return tuple(rank for rank in range(self.size) if rank != self.rank)
        local = self._local.progress.waiting_for if self._local else ()
        return local or (self._sockets.waiting_for if self._sockets else ())

    @property
    def exchanged_bytes(self) -> int:
        """The bytes of data that this rank has contributed to operations so far."""
        return self._exchanged_bytes

    @property
    def sent_bytes(self) -> int:
        """Total number of bytes that this rank has sent over TCP."""
        return self._sockets.sent_bytes if self._sockets else 0

    def enter(self, generation: int) -> None:
        """Set the generation of ranks to which this one belongs; call it first."""
        self._me = replace(self._me, generation=generation)

    @contextmanager
    def elsewhere(self, nbytes: int) -> Iterator[None]:
        """A context in which another library reduces a vector of this size."""
        self._elsewhere = True
        self._exchanged_bytes += nbytes
        try:
            yield
        finally:
            self._elsewhere = False

    def join(self) -> None:
        """Connect to the other ranks, unless connected.

        Raises CollectiveTimeoutError after ``timeout_s`` seconds, PeerLostError
        after ``interrupt``, and CollectiveError if it cannot listen.
        """
        self.connected()

    def allreduce(
        self, buffer: Array, op: ReduceOp, source: Array | None = None
    ) -> None:
        """All-reduce contiguous vectors of equal length and dtype into ``buffer``.

        ``buffer`` has shape (n,) and a numeric numpy dtype. ``op`` is one of
        ``UFUNCS``, else KeyError is raised. This rank contributes ``source``, a
        separate vector of the same length and dtype, or else ``buffer`` itself. The
        result is bitwise equal on all ranks: the terms of each host's ranks are
        reduced, and then those of the hosts, in the order of ``groups``.
        """
        if self.size == 1:
            if source is not None:
                buffer[:] = source
            return
        self.connected()
        self._exchanged_bytes += buffer.nbytes
        ufunc = UFUNCS[op]
        values = buffer if source is None else source
        if self._local is None or len(self._groups) > 1:
            if buffer.nbytes <= self.small_bytes:
                self._allreduce_directly(buffer, ufunc, values)
            else:
                self._sum_by_hosts(
                    *(buffer, ufunc, values),
                    lambda vector, source, _: PlainTerms(vector, source, ufunc),
                    buffer.dtype,
                )
        elif self._local.fits_at_once(buffer.nbytes):
            self._local.allreduce_at_once(buffer, ufunc, values)
        else:
            self._local.allreduce(buffer, ufunc, values)

    @property
    def scatters(self) -> bool:
        """Whether ``reduce_scatter`` and ``allgather_shards`` can be called.

        They can if each host has as many ranks as any other. Equal on all ranks; False
        until connected.
        """
        return len({len(group) for group in self._groups}) == 1

    @property
    def host_ranks(self) -> tuple[int, ...]:
        """This rank, and those of this host if all hosts have as many."""
        if not self.scatters:
            return (self.rank,)
        return next(tuple(ranks) for ranks in self._groups if self.rank in ranks)

    @property
    def scatter_order(self) -> tuple[int, ...]:
        """The ranks in the order of their shards: the first of each host come first."""
        return tuple(_in_order(self._groups))

    def reduce_scatter(
        self, source: Array, op: ReduceOp, bounds: Sequence[int], vector: Array
    ) -> Array:
        """This rank's shard of the reduced sources, with the bits of ``allreduce``.

        ``source`` has shape (n,), equal on all ranks like ``op`` and the dtype. Rank
        ``scatter_order[i]`` gets what is from ``bounds[i]`` to ``bounds[i + 1]``, as a
        part of ``vector``. Of that, only shards of ranks with this rank's place on
        their hosts are written. Both may be the same. Only if ``scatters``.
        """
        self._exchanged_bytes += source.nbytes
        ufunc, shards = UFUNCS[op], _Shards(self._groups, self.rank, bounds)
        if self._local is not None:
            self._local.reduce_scatter(vector, ufunc, source, shards.of_members)
            source = vector
        if len(shards.peers) > 1:
            terms = PlainTerms(vector, source, ufunc)
            self._sum(shards.peers, shards.of_peers, terms, vector.dtype, gathers=False)
        return vector[shards.own]

    def allgather_shards(self, vector: Array, bounds: Sequence[int]) -> None:
        """Copy every rank's shard into ``vector``; see ``reduce_scatter``."""
        shards = _Shards(self._groups, self.rank, bounds)
        own = vector[shards.own]
        self._exchanged_bytes += own.nbytes
        if len(shards.peers) > 1:
            with self._trials.of(own.dtype, own.nbytes) as codes:
                given = (self.rank, shards.peers, shards.of_peers, vector, self._coder)
                ends = gathering(*given, codes=codes)
                self.connected().transfer(*ends, self.timeout_s)
        if self._local is not None:
            self._local.allgather_shards(vector, shards.of_members)

    def allgather_on_host(self, vector: Array, bounds: Sequence[int]) -> None:
        """Copy the shards of this host's ranks into ``vector``, of shape (n,).

        ``host_ranks[i]`` has what is from ``bounds[i]`` to ``bounds[i + 1]``. There is
        more than one of these ranks.
        """
        assert self._local is not None
        self._exchanged_bytes += vector.nbytes // len(bounds[1:])
        self._local.allgather_shards(vector, bounds)

    def _allreduce_directly(
        self, buffer: Array, ufunc: np.ufunc, source: Array
    ) -> None:
        """All-gather the vectors; every rank reduces them all."""
        gathered = self._gathered(source.tobytes())
        vectors = [np.frombuffer(data, buffer.dtype) for data in gathered]
        buffer[:] = self.reduced(vectors, ufunc)

    def reduced(self, vectors: Sequence[Array], ufunc: np.ufunc) -> Array:
        """A new vector with the bits that ``allreduce`` gives, of all ranks' vectors.

        They are in rank order. The terms of each host are reduced first.
        """
        # An overflow is infinite on one machine, too.
        with np.errstate(over="ignore", invalid="ignore"):
            of_hosts = []
            for group in self._groups:
                first, *others = [vectors[rank] for rank in group]
                total = first.copy()
                for vector in others:
                    ufunc(total, vector, out=total)
                of_hosts.append(total)
            total, *others = of_hosts
            for vector in others:
                ufunc(total, vector, out=total)
        return total

    def _sum_by_hosts(
        self,
        buffer: Array,
        ufunc: np.ufunc,
        source: Array,
        terms_of: Callable[[Array, Array, Sequence[int]], Terms],
        dtype: np.dtype[Any],
    ) -> None:
        """All-reduce; ``terms_of`` are those that ranks of different hosts exchange.

        Its arguments are the vector for the results, this rank's term, and the bounds
        of the peers' parts; ``dtype`` is that of what is sent.
        """
        # As many shards as the smallest host has ranks.
        owners = min(len(group) for group in self._groups)
        start, end, me = 0, len(buffer), 0
        bounds = even_bounds(len(buffer), owners)
        if self._local is not None:
            me = self._local.me
            start, end = self._local.reduce_scatter(buffer, ufunc, source, bounds)
            source = buffer
        if me < owners:
            peers = [group[me] for group in self._groups]
            parts = even_bounds(end - start, len(peers))
            terms = terms_of(buffer[start:end], source[start:end], parts)
            self._sum(peers, parts, terms, dtype)
        if self._local is not None:
            self._local.allgather_shards(buffer, bounds)

    def _sum(
        self,
        peers: Sequence[int],
        bounds: Sequence[int],
        terms: Terms,
        dtype: np.dtype[Any],
        *,
        gathers: bool = True,
    ) -> None:
        """Reduce a vector among ranks of different hosts; see ``DirectSum``."""
        nbytes = (bounds[-1] - bounds[0]) * dtype.itemsize
        with self._trials.of(dtype, nbytes) as codes:
            given = (self.rank, peers, bounds, terms, self._coder)
            ends = DirectSum(*given, codes=codes, gathers=gathers).ends()
            self.connected().transfer(*ends, self.timeout_s)

    def allreduce_rounded(
        self, buffer: Array, rounding: Rounding, residual: Residual | None
    ) -> None:
        """Sum the ranks' buffers into ``buffer``, rounded between hosts.

        They are contiguous vectors of float32 or float64, of equal length on all ranks.
        With ``residual``, the rounding error is added to the next sum. The result is
        bitwise equal on all ranks.
        """
        self.connected()
        if len(self._groups) < 2:
            self.allreduce(buffer, ReduceOp.SUM)
            return
        self._exchanged_bytes += buffer.nbytes
        host = next(i for i, group in enumerate(self._groups) if self.rank in group)

        def terms_of(vector: Array, _: Array, bounds: Sequence[int]) -> Terms:
            own = bounds[host], bounds[host + 1]
            return RoundedTerms(vector, own, len(self._groups), rounding, residual)

        sent = rounding.empty(0).dtype
        self._sum_by_hosts(buffer, np.add, buffer, terms_of, sent)

    def allgather(self, data: bytes) -> list[bytes]:
        """Every rank's data, of any length, in rank order."""
        self._exchanged_bytes += len(data)
        return self._gathered(data)

    def _gathered(self, data: bytes) -> list[bytes]:
        sockets = self.connected()
        if self._local is not None and len(self._groups) == 1:
            return self._local.allgather(data)
        return self._swapped(sockets, [data] * self.size)

    def _swapped(self, sockets: PeerSockets, messages: Sequence[bytes]) -> list[bytes]:
        return sockets.swap(self.rank, range(self.size), messages, self.timeout_s)

    def alltoall(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send ``parts[r]`` to rank r; return what was received, in rank order.

        Uses TCP, even within a host.
        """
        self._exchanged_bytes += sum(map(len, parts))
        return self._swapped(self.connected(), parts)

    def broadcast(self, data: bytes, root: int) -> bytes:
        """The data of rank ``root``; the data of other ranks is ignored."""
        sockets = self.connected()
        if self.rank == root:
            self._exchanged_bytes += len(data)
            message = framed(data)
            sources = [OutgoingBytes(peer, message) for peer in sockets.peers]
            sockets.transfer(sources, [], self.timeout_s)
            return data
        sink = IncomingBytes(root)
        sockets.transfer([], [sink], self.timeout_s)
        return bytes(sink.data)

    def interrupt(self) -> None:
        """Make operations fail that wait for other ranks, here and on other ranks.

        Called from another thread, and repeatedly as long as an operation waits: the
        first call may come before the wait. Also called before ``close`` if this rank
        fails. The connections can no longer be used.
        """
        self._interrupted.set()
        if sockets := self._sockets:
            sockets.interrupt()

    def close(self) -> None:
        """Disconnect; may be called twice."""
        if self._sockets:
            self._sockets.close()
        if self._local:
            self._local.progress.close()

    def connected(self) -> PeerSockets:
        """The connections to the other ranks, which are made on first use."""
        if self._sockets is None:
            sockets = PeerSockets(
                connect(
                    self._me,
                    self._addresses,
                    timeout_s=self.timeout_s,
                    interrupted=self._interrupted,
                )
            )
            self._sockets = sockets
            if self.size > 1:
                self._groups, self._local = share_memory(
                    self.rank,
                    sockets,
                    lambda data: self._swapped(sockets, [data] * self.size),
                    self.timeout_s,
                    host_key=self._host_key,
                )
        return self._sockets


class _Shards:
    """Which shards of a vector belong to a rank, and to those it exchanges with.

    See ``HostTransport.reduce_scatter`` for ``bounds``.
    """

    def __init__(self, groups: Groups, me: int, bounds: Sequence[int]) -> None:
        hosts = len(groups)
        self.peers = next(ranks for ranks in zip(*groups, strict=True) if me in ranks)
        """The ranks with the same place on their hosts, one of each host."""
        own = _in_order(groups).index(me)
        first = own - own % hosts
        self.own = slice(bounds[own], bounds[own + 1])
        self.of_peers = bounds[first : first + hosts + 1]
        self.of_members = bounds[::hosts]
        """The bounds of what this host's ranks exchange with others."""


def _in_order(groups: Groups) -> list[int]:
    return [rank for ranks in zip(*groups, strict=True) for rank in ranks]
