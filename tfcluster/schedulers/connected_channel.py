"""The channel to an agent that has connected to us by itself."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from tfcluster.schedulers.process_channel import READ_BYTES
from tfcluster.schedulers.starting import is_readable

WORDS_S = 2.0
"""How long to wait for the last words of a process that we have not ended."""


class ConnectedChannel:
    """The standard input and output of a process that has connected to us.

    ``words`` gives its last words, perhaps only after the given number of seconds;
    ``leave`` is called once the channel is unused.
    """

    def __init__(
        self,
        connection: socket.socket,
        words: Callable[[float], str],
        leave: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._words = words
        self._leave = leave
        self._closed = False

    def fileno(self) -> int:
        return self._connection.fileno()

    def read(self) -> bytes:
        try:
            return self._connection.recv(READ_BYTES)
        except ConnectionResetError:
            # The process ended before it had read everything that we sent.
            # ``diagnosis`` has its last words.
            return b""

    def has_unread(self) -> bool:
        return is_readable(self._connection.fileno())

    def write(self, data: bytes) -> None:
        self._connection.sendall(data)

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        # The agent ends its tasks when it reads the end of file, as over SSH.
        self._closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._leave()

    def diagnosis(self) -> str:
        words = self._words(0.0 if self._closed else WORDS_S)
        self._leave()
        return words
