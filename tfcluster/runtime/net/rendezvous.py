"""The rendezvous of ranks: an authenticated connection between every two of them.

A rank listens on its own address and dials every lower rank. Connections that fail the
handshake are closed and do not disturb the others. The module does not know the purpose
of the connections.

In the handshake, both ends of a new connection prove that they know the token. Nothing
else is read before that: at most 76 bytes from an unauthenticated peer.

    dialer -> acceptor   "TFC1", own rank, acceptor's rank, nonce
    acceptor -> dialer   nonce, HMAC-SHA256 over "accept", both ranks and nonces
    dialer -> acceptor   HMAC-SHA256 over "dial", both ranks and nonces
    acceptor -> dialer   one byte: welcome

It is a challenge-response protocol like SKID3 (Menezes et al., "Handbook of Applied
Cryptography", 10.3.2).
"""

from __future__ import annotations

import hmac
import ipaddress
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tfcluster.runtime.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    PeerLostError,
)

_MAGIC = b"TFC1"
_HELLO = struct.Struct(">4sII32s")
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_WELCOME = b"\x01"


class HandshakeError(Exception):
    """The peer could not be authenticated as a rank of this run."""


@dataclass(frozen=True, slots=True)
class Member:
    """The identity of this end.

    ``generation`` keeps restarted ranks from connecting to ranks of an earlier attempt.
    """

    rank: int
    size: int
    token: bytes = field(repr=False)
    generation: int = 0

    def proof(self, role: bytes, ranks: tuple[int, int], nonces: bytes) -> bytes:
        """HMAC-SHA256, 32 bytes, that is valid for this role and connection only."""
        facts = struct.pack(">IIIQ", *ranks, self.size, self.generation)
        return hmac.digest(self.token, role + b"\0" + facts + nonces, "sha256")


def dial(connection: socket.socket, me: Member, peer: int) -> None:
    """Authenticate to rank ``peer``, and have it authenticate itself.

    Raises HandshakeError if it is not that rank, and OSError if the connection fails or
    its timeout expires.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    ranks = (me.rank, peer)
    connection.sendall(_HELLO.pack(_MAGIC, *ranks, nonce))
    answer = _receive(connection, _NONCE_BYTES + _PROOF_BYTES)
    nonces = nonce + answer[:_NONCE_BYTES]
    if not hmac.compare_digest(
        answer[_NONCE_BYTES:], me.proof(b"accept", ranks, nonces)
    ):
        raise HandshakeError("it does not know this run's token")
    connection.sendall(me.proof(b"dial", ranks, nonces))
    try:
        welcome = _receive(connection, len(_WELCOME))
    except ConnectionError:
        welcome = b""
    if welcome != _WELCOME:
        raise HandshakeError("it rejected the handshake")


def accept(connection: socket.socket, me: Member) -> int:
    """Authenticate the dialer and return its rank, which is higher than ours.

    Raises HandshakeError if it does not know the token or wants another rank, and
    OSError if the connection fails or times out.
    """
    hello = _receive(connection, _HELLO.size)
    magic, dialer, wanted, nonce = _HELLO.unpack(hello)
    if magic != _MAGIC or wanted != me.rank or not me.rank < dialer < me.size:
        raise HandshakeError("it is not a tfcluster rank, or dialled another rank")
    ranks = (dialer, me.rank)
    ours = secrets.token_bytes(_NONCE_BYTES)
    nonces = nonce + ours
    connection.sendall(ours + me.proof(b"accept", ranks, nonces))
    if not hmac.compare_digest(
        _receive(connection, _PROOF_BYTES), me.proof(b"dial", ranks, nonces)
    ):
        raise HandshakeError("it does not know this run's token")
    connection.sendall(_WELCOME)
    return int(dialer)


def _receive(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        portion = connection.recv(count - len(data))
        if not portion:
            raise ConnectionResetError("connection closed")
        data += portion
    return bytes(data)


_HANDSHAKE_S = 10.0
_FIRST_RETRY_S = 0.002
_RETRY_S = 0.05
"""Retry soon at first, since ranks usually start together, then less often."""
_POLL_S = 0.1
"""How often a wait for connections checks whether it was interrupted."""
_MAX_PORT = 65535
_MAX_UNAUTHENTICATED = 64
"""The maximum number of connections that are not yet authenticated."""


def connect(
    me: Member,
    addresses: Sequence[str],
    *,
    timeout_s: float,
    sockets: dict[int, socket.socket] | None = None,
    interrupted: threading.Event | None = None,
) -> dict[int, socket.socket]:
    """Connect to all other ranks; return a blocking socket for each.

    ``addresses`` are ``host:port`` in rank order. ``sockets`` gets the sockets one by
    one, so that other threads can see which ranks are missing. Raises
    CollectiveTimeoutError with the missing ranks after ``timeout_s`` seconds,
    PeerLostError soon after ``interrupted`` is set, and CollectiveError if it cannot
    listen, or for addresses that are malformed or not one per rank.
    """
    if len(addresses) != me.size:
        raise CollectiveError(
            f"{me.size} ranks need {me.size} addresses, got {len(addresses)}"
        )
    if me.size == 1:
        return {}
    deadline = time.monotonic() + timeout_s
    sockets = {} if sockets is None else sockets
    interrupted = interrupted or threading.Event()
    with listen(addresses, me.rank, f"rank {me.rank}") as listener:
        acceptor = Acceptor(listener, me)
        try:
            for peer in range(me.rank):
                names = (f"rank {me.rank}", f"rank {peer}")
                sockets[peer] = dial_until(
                    deadline, me, peer, addresses[peer], names, interrupted
                )
            while missing := set(range(me.rank + 1, me.size)) - sockets.keys():
                arrival = acceptor.next_arrival(deadline, interrupted)
                if arrival is None and interrupted.is_set():
                    raise _interrupted()
                if arrival is None:
                    raise CollectiveTimeoutError(
                        _timeout_message(me, missing, addresses)
                    )
                peer, connection = arrival
                _close(sockets.get(peer))
                sockets[peer] = connection
        except BaseException:
            for connection in sockets.values():
                connection.close()
            raise
        finally:
            acceptor.close()
    return sockets


def _timeout_message(me: Member, missing: set[int], addresses: Sequence[str]) -> str:
    ranks = ", ".join(f"{rank} ({addresses[rank]})" for rank in sorted(missing))
    return f"rank {me.rank} timed out waiting for rank {ranks}"


def _interrupted() -> PeerLostError:
    return PeerLostError("a rank has left before all were connected")


def _close(connection: socket.socket | None) -> None:
    if connection is not None:
        connection.close()


def parse_address(address: str) -> tuple[str, int]:
    """Split ``host:port`` or ``[v6]:port``. Raises CollectiveError for other forms."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    digits = port if port.isascii() and port.isdecimal() and len(port) <= 5 else ""
    if not colon or not host or not digits or int(digits) > _MAX_PORT:
        raise CollectiveError(f"the address {address[:300]!r} is not HOST:PORT")
    return host, int(digits)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(addresses: Sequence[str], index: int, name: str) -> socket.socket:
    """Listen on our own port, which the agent has bound without listening.

    If all addresses are loopback addresses, only our own address is bound, so that
    other hosts cannot connect. Otherwise all interfaces are bound, because a host may
    resolve its own name to another address than other hosts do. Raises CollectiveError
    if that fails or an address is malformed, and OSError if our host's name cannot be
    resolved.
    """
    host, port = parse_address(addresses[index])
    only_loopback = all(
        _is_loopback(parse_address(address)[0]) for address in addresses
    )
    family, kind, protocol, _, target = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    )[0]
    wildcard = "::" if family == socket.AF_INET6 else "0.0.0.0"
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(target if only_loopback else (wildcard, port))
        listener.listen(len(addresses) + _MAX_UNAUTHENTICATED)
    except OSError as error:
        listener.close()
        raise CollectiveError(
            f"{name} cannot listen on {addresses[index]}: {error.strerror}"
        ) from error
    return listener


def dial_until(
    deadline: float,
    me: Member,
    peer: int,
    address: str,
    names: tuple[str, str],
    interrupted: threading.Event | None = None,
) -> socket.socket:
    """Dial ``address`` repeatedly until both ends have authenticated each other.

    Returns the connection. ``deadline`` is in seconds, by ``time.monotonic``; ``names``
    has the names of both ends for messages, ours first. Raises CollectiveTimeoutError
    with the cause after the deadline, and PeerLostError soon after ``interrupted`` is
    set.
    """
    target = parse_address(address)
    interrupted = interrupted or threading.Event()
    refusal: HandshakeError | None = None
    failure: OSError | None = None
    pause_s = _FIRST_RETRY_S
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection = socket.create_connection(target, min(left, _HANDSHAKE_S))
            try:
                dial(connection, me, peer)
            except BaseException:
                connection.close()
                raise
            return connection
        except HandshakeError as error:
            refusal = error
        except OSError as error:
            failure = error
        if interrupted.wait(min(pause_s, left)):
            raise _interrupted()
        pause_s = min(2 * pause_s, _RETRY_S)
    # A peer that refused us and then gave up cannot be reached: the refusal is the
    # cause.
    cause = refusal or failure
    raise CollectiveTimeoutError(
        f"{names[0]} could not reach {names[1]} at {address}: {cause}"
    ) from cause


class Acceptor:
    """Accepts connections, and returns those that authenticate as ranks."""

    def __init__(self, listener: socket.socket, me: Member) -> None:
        self._listener = listener
        self._me = me
        self._closed = False
        self._arrivals: queue.SimpleQueue[tuple[int, socket.socket]] = (
            queue.SimpleQueue()
        )
        self._unauthenticated = threading.BoundedSemaphore(_MAX_UNAUTHENTICATED)
        threading.Thread(target=self._serve, daemon=True).start()

    def next_arrival(
        self, deadline: float, interrupted: threading.Event
    ) -> tuple[int, socket.socket] | None:
        """The next rank and its connection; None after the deadline or an interrupt.

        ``deadline`` is in seconds, by ``time.monotonic``.
        """
        while not interrupted.is_set() and (left_s := deadline - time.monotonic()) > 0:
            with suppress(queue.Empty):
                return self._arrivals.get(timeout=min(left_s, _POLL_S))
        return None

    def arrival(self) -> tuple[int, socket.socket]:
        """The next rank and its connection; waits forever."""
        return self._arrivals.get()

    def close(self) -> None:
        """Stop listening, and close connections that nobody has taken."""
        # close() alone would not wake the thread that waits in accept().
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._closed = True
        self._close_unclaimed()

    def _close_unclaimed(self) -> None:
        """Close connections that were accepted but are no longer needed."""
        with suppress(queue.Empty):
            while True:
                self._arrivals.get_nowait()[1].close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if self._unauthenticated.acquire(blocking=False):
                threading.Thread(
                    target=self._authenticate, args=(connection,), daemon=True
                ).start()
            else:
                connection.close()

    def _authenticate(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_HANDSHAKE_S)
            rank = accept(connection, self._me)
        except (OSError, HandshakeError):
            connection.close()
        else:
            self._arrivals.put((rank, connection))
            if self._closed:
                self._close_unclaimed()
        finally:
            self._unauthenticated.release()
