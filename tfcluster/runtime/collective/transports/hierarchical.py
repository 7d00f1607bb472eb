"""The ``host`` transport: shared memory within a host, TCP between hosts.

It uses plain Python and numpy. Small data go to every rank directly. The all-reduce of
a large vector is hierarchical: a reduce-scatter within each host, a ring all-reduce of
every shard between the hosts, and an all-gather within each host. Connections are made
on first use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from tfcluster.runtime.collective.float_coding import Coder, Trials
from tfcluster.runtime.collective.rounding import Residual, Rounding
from tfcluster.runtime.collective.transports.base import (
    UFUNCS,
    Array,
    ReduceOp,
)
from tfcluster.runtime.collective.transports.multiplexed_sockets import (
    IncomingBytes,
    OutgoingBytes,
    PeerSockets,
    framed,
)
from tfcluster.runtime.collective.transports.ring import Ring
from tfcluster.runtime.collective.transports.rounded_sum import RoundedSum
from tfcluster.runtime.collective.transports.shm_allreduce import (
    ShmCollectives,
    even_bounds,
)
from tfcluster.runtime.collective.transports.topology import Groups, share_memory
from tfcluster.runtime.net.rendezvous import Member, connect

TIMEOUT_S = 1800.0
"""A rank may well be silent while it saves a model or compiles a step."""

_DIRECT_BYTES = 1 << 14
"""A vector up to this size is faster in one step than around the ring."""


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
        self._groups: Groups = ()
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
        result is bitwise equal on all ranks. Between hosts, up to 16 KiB go directly,
        and more around rings.
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
            if buffer.nbytes <= _DIRECT_BYTES:
                self._allreduce_directly(buffer, ufunc, values)
            else:
                self._sum_by_hosts(buffer, ufunc, values, self._around_ring(ufunc))
        elif self._local.fits_at_once(buffer.nbytes):
            self._local.allreduce_at_once(buffer, ufunc, values)
        else:
            self._local.allreduce(buffer, ufunc, values)

    @property
    def scatters(self) -> bool:
        """Whether ``reduce_scatter`` and ``allgather_shards`` can be called.

        They can if all ranks share memory. Equal on all ranks; False until connected.
        """
        return self._local is not None and len(self._groups) == 1

    def reduce_scatter(
        self, source: Array, op: ReduceOp, bounds: Sequence[int], vector: Array
    ) -> Array:
        """This rank's shard of the reduced sources, with the bits of ``allreduce``.

        ``source`` has shape (n,), equal on all ranks like ``op`` and the dtype. Rank r
        gets what is from ``bounds[r]`` to ``bounds[r + 1]``, as a part of ``vector``,
        of which nothing else is written. Both may be the same. Only if ``scatters``.
        """
        assert self._local is not None
        self._exchanged_bytes += source.nbytes
        start, end = self._local.reduce_scatter(vector, UFUNCS[op], source, bounds)
        return vector[start:end]

    def allgather_shards(self, vector: Array, bounds: Sequence[int]) -> None:
        """Copy every rank's shard into ``vector``; see ``reduce_scatter``."""
        assert self._local is not None
        start, end = bounds[self.rank], bounds[self.rank + 1]
        self._exchanged_bytes += (end - start) * vector.itemsize
        self._local.allgather_shards(vector, bounds)

    def _allreduce_directly(
        self, buffer: Array, ufunc: np.ufunc, source: Array
    ) -> None:
        """All-gather the vectors; every rank reduces them all, in rank order."""
        gathered = self._gathered(source.tobytes())
        vectors = [np.frombuffer(data, buffer.dtype) for data in gathered]
        buffer[:] = vectors[0]
        for vector in vectors[1:]:
            ufunc(buffer, vector, out=buffer)

    def _sum_by_hosts(
        self,
        buffer: Array,
        ufunc: np.ufunc,
        source: Array,
        between: Callable[[Sequence[int], Array, Array], None],
    ) -> None:
        """``between`` exchanges a shard among ranks of different hosts."""
        # One ring per shard, and as many shards as the smallest host has ranks.
        owners = min(len(group) for group in self._groups)
        start, end, me = 0, len(buffer), 0
        bounds = even_bounds(len(buffer), owners)
        if self._local is not None:
            me = self._local.me
            start, end = self._local.reduce_scatter(buffer, ufunc, source, bounds)
            source = buffer
        if me < owners:
            ring_ranks = [group[me] for group in self._groups]
            between(ring_ranks, buffer[start:end], source[start:end])
        if self._local is not None:
            self._local.allgather_shards(buffer, bounds)

    def _around_ring(
        self, ufunc: np.ufunc
    ) -> Callable[[Sequence[int], Array, Array], None]:
        def act(ranks: Sequence[int], vector: Array, source: Array) -> None:
            with self._trials.of(vector.dtype, vector.nbytes) as codes:
                given = (self.rank, ranks, vector, ufunc, source, self._coder)
                ring = Ring(*given, codes=codes)
                self.connected().transfer(*ring.ends(), self.timeout_s)

        return act

    def allreduce_rounded(
        self, buffer: Array, rounding: Rounding, residual: Residual | None
    ) -> None:
        """Sum the ranks' buffers into ``buffer``, rounded between hosts.

        They are contiguous vectors of float32 or float64, of equal length on all ranks.
        With ``residual``, the rounding error is added to the next sum. The result is
        bitwise equal on all ranks.
        """
        sockets = self.connected()
        if len(self._groups) < 2:
            self.allreduce(buffer, ReduceOp.SUM)
            return
        self._exchanged_bytes += buffer.nbytes

        def between(ranks: Sequence[int], vector: Array, _: Array) -> None:
            sent = rounding.empty(0).dtype
            with self._trials.of(sent, len(vector) * sent.itemsize) as codes:
                given = (self.rank, ranks, vector, rounding, residual, self._coder)
                total = RoundedSum(*given, codes=codes)
                sockets.transfer(*total.ends(), self.timeout_s)

        self._sum_by_hosts(buffer, np.add, buffer, between)

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
