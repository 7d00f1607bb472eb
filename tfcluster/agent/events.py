"""The socket between the agent and one task: events come in, requests go out.

Knows no processes. A task may write anything to it, or nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

from tfcluster.agent.constants import EVENT_BYTES
from tfcluster.agent.loop import Loop
from tfcluster.light_dataclasses import Struct
from tfcluster.protocol import local
from tfcluster.protocol.frames import encode
from tfcluster.protocol.wire import Frame, LineBuffer, WireError, parse

_READ_BYTES = 64 << 10
_LAST_READS = 64


class EventSocket:
    """The agent's end. ``say`` is called with each event, ``complain`` at most once.

    ``on_close`` is called when the task has closed its end.
    """

    def __init__(
        self,
        loop: Loop,
        end: socket.socket,
        say: Callable[[Frame], None],
        complain: Callable[[str], None],
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = loop
        self._end = end
        self._say = say
        self._complain = complain
        self._on_close = on_close
        self._lines = LineBuffer(EVENT_BYTES)
        self._complained = False
        end.setblocking(False)
        loop.watch(end.fileno(), self._read)

    def ask_stacks(self) -> None:
        # If the task does not read requests, the socket fills up and they are lost.
        self.answer(local.Stacks())

    def answer(self, answer: Struct) -> None:
        with suppress(OSError):
            self._end.send(encode(answer))

    def finish(self) -> None:
        """Read what has arrived, and close."""
        for _ in range(_LAST_READS):
            if self._end.fileno() < 0 or not self._read():
                break
        self._close()

    def _read(self) -> bool:
        """Read once; returns whether there was something."""
        try:
            data = self._end.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._close()
            return False
        try:
            for line in self._lines.feed(data):
                self._take(line)
        except WireError as error:
            self._complain_once(str(error))
        return True

    def _take(self, line: bytes) -> None:
        try:
            event = parse(line)
        except WireError as error:
            self._complain_once(str(error))
        else:
            self._say(event)

    def _complain_once(self, cause: str) -> None:
        if not self._complained:
            self._complained = True
            self._complain(cause)

    def _close(self) -> None:
        if self._end.fileno() >= 0:
            self._loop.unwatch(self._end.fileno())
            self._end.close()
            self._on_close()
