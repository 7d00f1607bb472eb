"""Transfers bytes over several sockets at once, as each socket becomes ready.

Sources and sinks decide what is sent and where received bytes go. This module only
handles readiness, deadlines, lost peers and waiting times.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from tfcluster.runtime.errors import peer_lost, peers_late

_BUFFER_BYTES = 1 << 21
_MAX_PORTION = 1 << 21
"""The maximum number of bytes per call, so that sending and receiving alternate."""
_LOW_WATER = 1 << 19
_GROWTH_BYTES = 1 << 24
"""Wake up for a large message after this many bytes, not at every packet."""


class PendingBytes(Protocol):
    """Bytes to send to one rank."""

    @property
    def rank(self) -> int: ...

    @property
    def done(self) -> bool:
        """Whether everything has been sent."""

    def view(self) -> memoryview:
        """The bytes that can be sent now; empty while they depend on later data."""

    def advance(self, count: int) -> None:
        """Note that the first ``count`` bytes of ``view()`` have been sent."""


class Sink(Protocol):
    """Memory for the bytes from one rank."""

    @property
    def rank(self) -> int: ...

    @property
    def done(self) -> bool:
        """Whether everything has been received."""

    @property
    def expected_bytes(self) -> int:
        """How many bytes the rank sends before it has to wait for any of ours."""

    def view(self) -> memoryview:
        """Memory for the next bytes; not empty unless ``done``."""

    def advance(self, count: int) -> None:
        """Note that ``count`` bytes have been written to the start of ``view()``."""


class PeerSockets:
    """The connections to the other ranks.

    ``waited_s`` is the time spent waiting so far, in seconds. ``waiting_for`` has the
    ranks from which bytes are missing right now. ``sent_bytes`` counts the bytes sent
    so far.
    """

    def __init__(self, connections: Mapping[int, socket.socket]) -> None:
        """``connections`` has TCP sockets by rank, which become non-blocking."""
        self._connections = dict(connections)
        self.waited_s = 0.0
        self.waiting_for: tuple[int, ...] = ()
        self.sent_bytes = 0
        self._low_water: dict[int, int] = {}
        for connection in self._connections.values():
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def peers(self) -> list[int]:
        """The other ranks, in ascending order."""
        return sorted(self._connections)

    def fileno(self, peer: int) -> int:
        """The descriptor of the connection to a rank."""
        return self._connections[peer].fileno()

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.close()

    def swap(
        self,
        me: int,
        ranks: Sequence[int],
        messages: Sequence[bytes],
        timeout_s: float,
    ) -> list[bytes]:
        """All-to-all: send each of ``ranks`` a message; return what each rank sent.

        The message to ``me`` is returned as it is. ``timeout_s`` (seconds) and errors
        are as for ``transfer``.
        """
        pairs = list(zip(ranks, messages, strict=True))
        sinks = {peer: IncomingBytes(peer) for peer in ranks if peer != me}
        sources = [
            OutgoingBytes(peer, framed(data)) for peer, data in pairs if peer != me
        ]
        self.transfer(sources, list(sinks.values()), timeout_s)
        return [data if peer == me else bytes(sinks[peer].data) for peer, data in pairs]

    def interrupt(self) -> None:
        """Make a running transfer fail soon, with PeerLostError. For another thread."""
        for connection in self._connections.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def transfer(
        self, sources: Sequence[PendingBytes], sinks: Sequence[Sink], timeout_s: float
    ) -> None:
        """Send and receive until all sources and sinks are done.

        Raises PeerLostError if a rank has disconnected, and CollectiveTimeoutError
        after ``timeout_s`` seconds without any progress.
        """
        try:
            while True:
                while self._send(sources) | self._receive(sinks):
                    pass
                if all(end.done for end in (*sources, *sinks)):
                    return
                self._wait(sources, sinks, timeout_s)
        finally:
            self.waiting_for = ()

    def _send(self, sources: Sequence[PendingBytes]) -> bool:
        progress = False
        for source in sources:
            if source.done or not (view := source.view()):
                continue
            try:
                count = self._connections[source.rank].send(view[:_MAX_PORTION])
            except BlockingIOError:
                continue
            except OSError as error:
                raise peer_lost(source.rank) from error
            source.advance(count)
            self.sent_bytes += count
            progress = True
        return progress

    def _receive(self, sinks: Sequence[Sink]) -> bool:
        progress = False
        for sink in sinks:
            if sink.done:
                continue
            view = sink.view()
            try:
                count = self._connections[sink.rank].recv_into(view[:_MAX_PORTION])
            except BlockingIOError:
                continue
            except OSError as error:
                raise peer_lost(sink.rank) from error
            if count == 0:
                raise peer_lost(sink.rank)
            sink.advance(count)
            progress = True
        return progress

    def _wait(
        self, sources: Sequence[PendingBytes], sinks: Sequence[Sink], timeout_s: float
    ) -> None:
        events: dict[int, int] = {}
        for sink in sinks:
            if not sink.done:
                events[sink.rank] = select.POLLIN
                self._wake_at(sink)
        self.waiting_for = tuple(events)
        for source in sources:
            if not source.done and source.view():
                events[source.rank] = events.get(source.rank, 0) | select.POLLOUT
        poll = select.poll()
        for rank, wanted in events.items():
            poll.register(self._connections[rank], wanted)
        start = time.monotonic()
        ready = poll.poll(timeout_s * 1000)
        self.waited_s += time.monotonic() - start
        if not ready:
            raise peers_late(self.waiting_for or sorted(events), timeout_s)

    def _wake_at(self, sink: Sink) -> None:
        """Set the number of bytes from a rank that are worth a wakeup (SO_RCVLOWAT)."""
        wanted = min(max(sink.expected_bytes, 1), _LOW_WATER)
        if self._low_water.get(sink.rank, 1) != wanted:
            self._low_water[sink.rank] = wanted
            with suppress(OSError):  # Only an optimisation.
                self._connections[sink.rank].setsockopt(
                    socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted
                )


class OutgoingBytes:
    """A source whose bytes are all known from the beginning."""

    def __init__(self, rank: int, data: bytes | memoryview) -> None:
        self.rank = rank
        self._rest = memoryview(data)

    @property
    def done(self) -> bool:
        """Whether everything has been sent."""
        return not self._rest

    def view(self) -> memoryview:
        """The bytes that are still to be sent."""
        return self._rest

    def advance(self, count: int) -> None:
        """Note that ``count`` bytes of ``view()`` have been sent."""
        self._rest = self._rest[count:]


class IncomingBytes:
    """A sink for one message, preceded by its length (8 bytes, big-endian).

    Memory grows with the bytes that have arrived, not with the length that the peer
    announces: by ``growth_bytes``, or to twice its size.
    """

    def __init__(self, rank: int, *, growth_bytes: int = _GROWTH_BYTES) -> None:
        self.rank = rank
        self._growth_bytes = growth_bytes
        self.data = bytearray(8)
        self._position = 0
        self._length: int | None = None

    @property
    def done(self) -> bool:
        """Whether the whole message has been received; it is then in ``data``."""
        return self._length is not None and self._position == self._length

    @property
    def expected_bytes(self) -> int:
        """See ``Sink``."""
        return len(self.view())

    def view(self) -> memoryview:
        """Memory for the next bytes, first for the bytes of the length."""
        return memoryview(self.data)[self._position :]

    def advance(self, count: int) -> None:
        """Note that ``count`` bytes have been written to the start of ``view()``."""
        self._position += count
        if self._position < len(self.data):
            return
        if self._length is None:
            self._length = int.from_bytes(self.data, "big")
            self.data = bytearray()
            self._position = 0
        rest = self._length - self._position
        # Not resized in place: views of the old memory may still exist.
        more = min(rest, max(self._growth_bytes, self._position))
        grown = bytearray(self._position + more)
        grown[: self._position] = self.data
        self.data = grown


def framed(data: bytes) -> bytes:
    """``data`` preceded by its length, for ``IncomingBytes``."""
    return len(data).to_bytes(8, "big") + data
