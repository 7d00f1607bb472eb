"""The sockets between the agent and a task: events come in, requests go out.

Each attempt also has a socket to which every process below the task's command can
connect: the first one that asks gets the rank. Any process may write anything there.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

from tfcluster.agent.loop import Loop
from tfcluster.base.light_dataclasses import Struct
from tfcluster.protocol import local
from tfcluster.protocol.frames import encode, type_of
from tfcluster.protocol.wire import Frame, LineBuffer, WireError, parse

EVENT_BYTES = 256 << 10
_READ_BYTES = 64 << 10
_LAST_READS = 64


class FrameSocket:
    """Our end of a socket on which another process of this host writes frames."""

    def __init__(
        self,
        loop: Loop,
        end: socket.socket,
        on_frame: Callable[[Frame], None],
        on_garbage: Callable[[str], None],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = loop
        self.socket = end
        self._on_frame = on_frame
        self._on_garbage = on_garbage
        self._on_end = on_end
        self._lines = LineBuffer(EVENT_BYTES)
        self._complained = False
        end.setblocking(False)
        loop.watch(end.fileno(), self._read)

    @property
    def is_open(self) -> bool:
        return self.socket.fileno() >= 0

    def send(self, frame: Struct) -> None:
        """Send a frame; it is lost if the process reads none."""
        with suppress(OSError):
            self.socket.send(encode(frame))

    def finish(self) -> None:
        for _ in range(_LAST_READS):
            if not self.is_open or not self._read():
                break
        self.close()

    def close(self) -> None:
        if self.is_open:
            self._loop.unwatch(self.socket.fileno())
            self.socket.close()

    def _read(self) -> bool:
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.close()
            self._on_end()
            return False
        try:
            for line in self._lines.feed(data):
                self._handle(line)
        except WireError as error:
            self._complain(str(error))
        return True

    def _handle(self, line: bytes) -> None:
        try:
            if self.is_open:
                self._on_frame(parse(line))
        except WireError as error:
            self._complain(str(error))

    def _complain(self, cause: str) -> None:
        if not self._complained:
            self._complained = True
            self._on_garbage(cause)


ADDRESS = "TFCLUSTER_EVENTS_SOCKET"
"""The variable with the socket's name in the abstract namespace, see unix(7)."""

_WAITING = 16
_MAX_CONNECTIONS = 64
_COMMAND_CHARS = 200
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid


def listen() -> socket.socket:
    """A listening Unix socket with a unique name. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(f"\0tfcluster-{os.urandom(16).hex()}")
        listener.listen(_WAITING)
    except OSError:
        listener.close()
        raise
    return listener


class Claims:
    """The claims of one attempt, by processes that connect to ``listener``."""

    def __init__(
        self,
        loop: Loop,
        listener: socket.socket,
        say: Callable[[Frame], None],
        complain: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._say = say
        self._complain = complain
        self._connections: dict[FrameSocket, int] = {}  # with their pids
        self._holder: FrameSocket | None = None
        self._last: tuple[int, str] | None = None
        """Pid and command of the process that holds the rank, or has held it."""
        self._count = 0
        self.address = listener.getsockname()[1:].decode()
        loop.watch(self._listener.fileno(), self._accept)

    def ask_stacks(self) -> None:
        if self._holder is not None:
            self._holder.send(local.StacksMessage())

    def finish(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.unwatch(self._listener.fileno())
            while self._accept():
                pass
            self._listener.close()
        for connection in list(self._connections):
            connection.finish()
        self._connections.clear()
        self._holder = None

    def _accept(self) -> bool:
        try:
            end, _ = self._listener.accept()
        except OSError as error:
            # ECONNABORTED: the process is already gone, but others may be waiting. Any
            # other error: none is waiting, or too many files are open.
            return error.errno == errno.ECONNABORTED
        peer = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        pid, uid, _ = _PEER.unpack(peer)
        if uid != os.geteuid() or len(self._connections) >= _MAX_CONNECTIONS:
            end.close()
            return True
        connection = FrameSocket(
            self._loop,
            end,
            lambda event: self._handle(connection, event),
            self._complain,
            lambda: self._gone(connection),
        )
        self._connections[connection] = pid
        return True

    def _handle(self, connection: FrameSocket, event: Frame) -> None:
        if event["type"] == type_of(local.ClaimRequest):
            connection.send(self._claimed(connection, local.decode_claim(event)))
        elif connection is self._holder:
            self._say(event)

    def _claimed(
        self, connection: FrameSocket, claim: local.ClaimRequest
    ) -> local.Claimed:
        pid, command = self._last or (None, None)
        taken = self._holder is not None
        answer = local.Claimed(taken, self._count, pid, command)
        if not taken:
            self._holder = connection
            command = claim.command[:_COMMAND_CHARS]
            self._last = self._connections[connection], command
            self._count += 1
        return answer

    def _gone(self, connection: FrameSocket) -> None:
        self._connections.pop(connection, None)
        if connection is self._holder:
            self._holder = None
