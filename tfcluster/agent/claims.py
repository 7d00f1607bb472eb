"""Gives a task's rank to one of its processes: the first one that asks for it.

A task's command may be a script that starts Python, or a program that trains in a
child process. So each attempt of a task has a socket to which every process below the
command can connect. Knows neither ranks nor training.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable

from tfcluster.agent.events import EventSocket
from tfcluster.agent.loop import Loop
from tfcluster.light_dataclasses import dataclass
from tfcluster.wire import Frame

ADDRESS = "TFCLUSTER_EVENTS_SOCKET"
"""The variable with the socket's name in the abstract namespace, see unix(7)."""

_WAITING = 16
_MAX_CONNECTIONS = 64
_COMMAND_CHARS = 200
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid


@dataclass(frozen=True, slots=True)
class Claimant:
    """A process that holds the rank, or has held it."""

    pid: int
    command: str

    def keys(self) -> dict[str, object]:
        return {"pid": self.pid, "command": self.command}


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
    """The claims of one attempt; processes connect to ``listener``.

    ``say`` is called with every event of the process that holds the rank, ``complain``
    with a cause when a process sends something invalid.
    """

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
        self._connections: dict[EventSocket, int] = {}  # with their pids
        self._holder: EventSocket | None = None
        self._last: Claimant | None = None
        self._count = 0
        self.address = listener.getsockname()[1:].decode()
        loop.watch(self._listener.fileno(), self._accept)

    def ask_stacks(self) -> None:
        if self._holder is not None:
            self._holder.ask_stacks()

    def finish(self) -> None:
        """Read what has arrived, and close."""
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
        """Accept a connection; returns whether there was one."""
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
        connection = EventSocket(
            self._loop,
            end,
            lambda event: self._take(connection, event),
            self._complain,
            on_close=lambda: self._gone(connection),
        )
        self._connections[connection] = pid
        return True

    def _take(self, connection: EventSocket, event: Frame) -> None:
        if event["type"] == "claim":
            connection.answer(self._claimed(connection, event))
        elif connection is self._holder:
            self._say(event)

    def _claimed(self, connection: EventSocket, event: Frame) -> Frame:
        last = {} if self._last is None else self._last.keys()
        if self._holder is not None:
            return {"type": "taken", **last}
        self._holder = connection
        command = str(event.get("command"))[:_COMMAND_CHARS]
        self._last = Claimant(self._connections[connection], command)
        self._count += 1
        return {"type": "claimed", "number": self._count - 1, **last}

    def _gone(self, connection: EventSocket) -> None:
        self._connections.pop(connection, None)
        if connection is self._holder:
            self._holder = None
