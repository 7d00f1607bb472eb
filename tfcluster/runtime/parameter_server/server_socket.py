"""The server socket of a ps: authenticates clients, and runs a thread for each.

Messages are read only from tasks that have proven to know the run's token.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tfcluster.runtime.errors import CollectiveError, CollectiveTimeoutError
from tfcluster.runtime.net.buffer_pool import Pool
from tfcluster.runtime.net.rendezvous import Acceptor, Member, dial_until, listen
from tfcluster.runtime.parameter_server.messages import (
    BufferTable,
    MessageError,
    PsMessage,
    ServerChannel,
    receive,
    send,
)
from tfcluster.runtime.parameter_server.service import RefusedError, Service

_BUFFER_BYTES = 1 << 22
_FREE_CHECKS, _FREE_CHECK_S = 20, 0.0005
_PS_GENERATION = 1 << 32
"""A generation that ranks never have, so that proofs for a ps are not valid between
ranks."""


STARTED = b"\1"
"""The answer to a rank that asks for TensorFlow's server."""


def member(
    index: int, rank: int | None, size: int, token: bytes, *, asks: bool = False
) -> Member:
    """The handshake identity of ps ``index`` (rank None), or of a rank that dials it.

    The ps is member 0, and rank r is member r + 1. If rank r only asks for TensorFlow's
    server, it is member size + r + 1, because its connection is not a client's.
    """
    number = 0 if rank is None else rank + 1 + (size if asks else 0)
    return Member(number, 2 * size + 1, token, generation=_PS_GENERATION + index)


def tune(connection: socket.socket) -> None:
    """Set the socket options that both ends use."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@dataclass(slots=True)
class _Client:
    """A connected training task."""

    rank: int
    connection: socket.socket
    channel: ServerChannel = field(default_factory=ServerChannel)
    copied_models: set[str] = field(default_factory=set)
    """Models whose optimizer keeps references to gradients, and therefore gets copies.
    """


class ServerSocket:
    """Serves clients on the port of ps ``index``, until ``close``."""

    def __init__(
        self,
        service: Service,
        addresses: Sequence[str],
        index: int,
        *,
        size: int,
        token: bytes,
        start_server: Callable[[], bool] | None = None,
    ) -> None:
        """Listen on the address; raises CollectiveError if that fails.

        ``start_server`` starts TensorFlow's server, unless it is running, and returns
        whether it is running now. Several threads call it.
        """
        self._service = service
        self._size = size
        self._start_server = start_server
        self._pool = Pool()
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        listener = listen(addresses, index, f"ps:{index}")
        self._acceptor = Acceptor(listener, member(index, None, size, token))
        threading.Thread(
            target=self._accept_clients, name="ps acceptor", daemon=True
        ).start()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        with suppress(OSError):
            self._acceptor.close()
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept_clients(self) -> None:
        while True:
            number, connection = self._acceptor.arrival()
            asks, rank = divmod(number - 1, self._size)
            threading.Thread(
                target=self._answer_request if asks else self._serve_client,
                args=(rank, connection),
                name=f"rank {rank}",
                daemon=True,
            ).start()

    def _answer_request(self, rank: int, connection: socket.socket) -> None:
        """Start TensorFlow's server for a rank; closing unanswered means failure."""
        with connection, suppress(OSError):
            if self._start_server is not None and self._start_server():
                connection.sendall(STARTED)

    def _serve_client(self, rank: int, connection: socket.socket) -> None:
        with self._lock:
            self._connections.add(connection)
        self._service.connected(rank, connection)
        client = _Client(rank, connection)
        try:
            connection.settimeout(None)
            tune(connection)
            while True:
                self._serve_request(client)
        except (OSError, EOFError, MessageError):
            # The client is gone or violates the protocol; the other clients continue.
            pass
        finally:
            self._service.disconnected(rank, connection)
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _serve_request(self, client: _Client) -> None:
        request = receive(client.connection, self._pool, client.channel.buffers)
        model, buffer = str(request.header.get("model")), request.shared_buffer
        if model in client.copied_models:
            request = PsMessage(request.header, [a.copy() for a in request.arrays])
        reply = self._reply(client, request)
        # Release the arrays, so that the client can reuse their memory.
        del request
        if buffer is not None and not _wait_until_free(client.channel.buffers, buffer):
            self._service.release(model)
            client.copied_models.add(model)
        send(client.connection, reply)

    def _reply(self, client: _Client, request: PsMessage) -> PsMessage:
        try:
            if request.header.get("op") == "share":
                return client.channel.attach(request)
            return self._service.answer(
                client.rank,
                client.connection,
                request,
                lambda answer: client.channel.answer(request.header, answer),
            )
        except RefusedError as error:
            return PsMessage({"error": error.kind, "text": str(error)})
        except Exception as error:
            # An error of TensorFlow, or a malformed request: the client gets it.
            text = f"{type(error).__name__}: {error}"
            return PsMessage({"error": "failed", "text": text})


def _wait_until_free(buffers: BufferTable, number: int) -> bool:
    """Whether no array refers to a buffer any more.

    Waits a moment, because TensorFlow's threads may be about to release their arrays.
    """
    for _ in range(_FREE_CHECKS):
        if buffers.is_free(number):
            return True
        time.sleep(_FREE_CHECK_S)
    return False


# --- requests for TensorFlow's server -------------------------------------------------


_TRY_S = 5.0
_START_S = 60.0


def request_server(
    addresses: Sequence[str], index: int, *, rank: int, size: int, token: bytes
) -> bool:
    """Ask a ps to start TensorFlow's server, which Keras does not need.

    That server executes anything that anyone sends, so its port stays closed until a
    training task of the run has proven that it knows the run's token. The connection is
    the request; the ps answers with one byte once its server listens. Returns whether
    ps ``index`` has started its server; False if it does not answer now.

    ``addresses`` are the addresses of all ps tasks' own services, and ``size`` is the
    number of training tasks. Raises CollectiveError if the ps could not start the
    server.
    """
    identity = member(index, rank, size, token, asks=True)
    names = (f"rank {rank}", f"ps:{index}")
    try:
        deadline = time.monotonic() + _TRY_S
        connection = dial_until(deadline, identity, 0, addresses[index], names)
    except CollectiveTimeoutError:
        return False
    with connection:
        try:
            connection.settimeout(_START_S)
            answer = connection.recv(1)
        except OSError:
            return False
    if answer != STARTED:
        raise CollectiveError(
            f"ps:{index} could not start TensorFlow's server; its log has the reason"
        )
    return True
