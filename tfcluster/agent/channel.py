"""The agent's side of the channel: reads and writes frames.

Control frames overtake log frames, and a launcher that does not read never blocks the
loop. Does not know what requests mean.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from functools import partial

from tfcluster.agent.console_lines import ConsoleQueue
from tfcluster.agent.loop import Loop
from tfcluster.protocol import messages, requests
from tfcluster.protocol.frames import encode
from tfcluster.protocol.requests import Request
from tfcluster.protocol.wire import Decoder, WireError

_EVENT_QUEUE_BYTES = 4 << 20  # beyond that, events of tasks are dropped
_READ_BYTES = 256 << 10


class Channel:
    """Calls ``on_request`` with each request, ``on_end`` with a cause when the other
    side is gone, and ``on_garbage`` with a cause when it violates the protocol."""

    def __init__(
        self, loop: Loop, ends: tuple[int, int], backlog: ConsoleQueue
    ) -> None:
        self._loop = loop
        self._in, self._out = ends
        self._backlog = backlog
        self._decoder = Decoder()
        self._queue: deque[bytes] = deque()
        self._queued = 0
        self._buffer = memoryview(b"")
        self._waiting = False
        self._closed = False
        self._unsaid = 0
        self.on_request: Callable[[Request], None] = lambda request: None
        self.on_end: Callable[[str], None] = lambda cause: None
        self.on_garbage: Callable[[str], None] = lambda cause: None
        os.set_blocking(self._out, False)
        os.set_blocking(self._in, False)
        loop.watch(self._in, self.read)

    def send(self, message: messages.Message) -> None:
        """Queue a control frame, and write as much as possible."""
        self._enqueue(_line(message))

    def send_event(self, message: messages.Message) -> None:
        """Queue news of a task; dropped if over _EVENT_QUEUE_BYTES are queued."""
        if self._queued > _EVENT_QUEUE_BYTES:
            self._unsaid += 1
            return
        if self._unsaid:
            count, self._unsaid = self._unsaid, 0
            self.send(messages.Note(f"{count} events of tasks were dropped"))
        self._enqueue(_line(message))

    def _enqueue(self, line: bytes) -> None:
        if not self._closed:
            self._queue.append(line)
            self._queued += len(line)
            self.flush()

    @property
    def idle(self) -> bool:
        """Whether everything is written, or there is nobody to write to."""
        return self._closed or not (self._buffer or self._queue or self._waiting)

    def send_ping(self) -> None:
        """Send a heartbeat, unless other frames are queued, which serve as well."""
        if not self._queue:
            self.send(messages.Ping())

    def stop_reading(self) -> None:
        self._loop.unwatch(self._in)

    def flush(self) -> None:
        """Write as much as the other side accepts."""
        while not self._closed and not self._waiting and self._fill():
            try:
                written = os.write(self._out, self._buffer)
            except BlockingIOError:
                self._waiting = True
                self._loop.watch(self._out, self._writable, writing=True)
            except OSError as error:
                self._closed = True
                # Posted, not called, so that callers of ``send`` are not interrupted.
                self._loop.post(partial(self.on_end, f"cannot write: {error.strerror}"))
            else:
                self._buffer = self._buffer[written:]

    def _writable(self) -> None:
        self._loop.unwatch(self._out)
        self._waiting = False
        self.flush()

    def _fill(self) -> bool:
        if not self._buffer:
            if self._queue:
                line = self._queue.popleft()
                self._queued -= len(line)
                self._buffer = memoryview(line)
            elif (chunk := self._backlog.pop()) is not None:
                lines = tuple(chunk.lines)
                log = messages.Log(*chunk.source, lines=lines, dropped=chunk.dropped)
                self._buffer = memoryview(_line(log))
        return bool(self._buffer)

    def read(self) -> None:
        try:
            data = os.read(self._in, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(f"cannot read: {error.strerror}")
            return
        if not data:
            self._end("end of file")
            return
        try:
            for frame in self._decoder.feed(data):
                self.on_request(requests.decode(frame))
        except WireError as error:
            self.stop_reading()
            self.on_garbage(str(error))

    def _end(self, cause: str) -> None:
        self.stop_reading()
        self.on_end(cause)


def _line(message: messages.Message) -> bytes:
    try:
        return encode(message)
    except WireError as error:
        return encode(messages.Note(str(error)))
