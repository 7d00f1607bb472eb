"""The line between the agent and one task: what the task says, what it is asked.

Knows no processes. A task may write anything there, or nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

from tfcluster.agent.constants import EVENT_BYTES
from tfcluster.agent.loop import Loop
from tfcluster.wire import Frame, LineBuffer, WireError, encode, parse

_READ_BYTES = 64 << 10
_LAST_READS = 64


class EventSocket:
    """The agent's end. ``say`` gets each event, ``complain`` a cause, once.

    ``on_close`` is called when the task has hung up.
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
        # A task that does not read them has no room left for further requests.
        self.answer({"type": "stacks"})

    def answer(self, frame: Frame) -> None:
        with suppress(OSError):
            self._end.send(encode(frame))

    def finish(self) -> None:
        """Read what is there, and close."""
        for _ in range(_LAST_READS):
            if self._end.fileno() < 0 or not self._read():
                break
        self._close()

    def _read(self) -> bool:
        """Whether there was something."""
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
