"""A single-threaded event loop: descriptors, timers, signals, calls from threads.

Knows nothing about frames or tasks. Callbacks must not block.
"""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

Callback = Callable[[], object]

_PAUSE_S = 1.0  # after a longer delay, the process must have been stopped or starved


class Timer:
    def __init__(self, callback: Callback) -> None:
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        self.callback = None


class Loop:
    """Runs callbacks until ``stop``; an exception in one of them ends ``run``."""

    def __init__(self) -> None:
        # poll, not epoll: standard input may be a file, which epoll refuses.
        self._selector = selectors.PollSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._count = itertools.count()
        self._posted: deque[Callback] = deque()
        self._paused_s = 0.0
        self._stopped = False
        self._wake_out, self._wake_in = _pipe()
        self.watch(self._wake_out, self._run_posted)

    @staticmethod
    def now() -> float:
        return time.monotonic()

    def awake(self) -> float:
        """A clock, in seconds, that stands still while this process does not run."""
        return self.now() - self._paused_s

    def watch(self, fd: int, callback: Callback, *, writing: bool = False) -> None:
        event = selectors.EVENT_WRITE if writing else selectors.EVENT_READ
        self._selector.register(fd, event, callback)

    def unwatch(self, fd: int) -> None:
        with suppress(KeyError):
            self._selector.unregister(fd)

    def later(self, delay_s: float, callback: Callback) -> Timer:
        timer = Timer(callback)
        due = self.now() + delay_s
        heapq.heappush(self._timers, (due, next(self._count), timer))
        return timer

    def post(self, callback: Callback) -> None:
        """Schedule a call as soon as possible; the only thread-safe method."""
        self._posted.append(callback)
        # A full pipe wakes the loop as well.
        with suppress(BlockingIOError):
            os.write(self._wake_in, b"\0")

    def on_signals(self, signals: Iterable[int], call: Callable[[int], None]) -> None:
        """Handle signals as events; unlike SIG_IGN, children do not inherit this."""
        numbers_out, numbers_in = _pipe()

        def read() -> None:
            for signum in sorted(set(os.read(numbers_out, 4096))):
                call(signum)

        for signum in signals:
            signal.signal(signum, lambda *_: None)
        signal.set_wakeup_fd(numbers_in, warn_on_full_buffer=False)
        self.watch(numbers_out, read)

    def stop(self) -> None:
        self._stopped = True

    def run(self) -> None:
        while not self._stopped:
            began = self.now()
            timeout = self._timeout(began)
            ready = self._selector.select(timeout)
            selected = self.now()
            self._note_pause(selected - began - (timeout or 0.0))
            for key, _ in ready:
                # An earlier callback of this round may have unwatched it.
                if self._selector.get_map().get(key.fd) == key:
                    key.data()
            while self._timers and self._timers[0][0] <= selected and not self._stopped:
                callback = heapq.heappop(self._timers)[2].callback
                if callback is not None:
                    callback()
            self._note_pause(self.now() - selected)

    def _timeout(self, now: float) -> float | None:
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0][0] - now) if self._timers else None

    def _note_pause(self, away_s: float) -> None:
        if away_s > _PAUSE_S:
            self._paused_s += away_s

    def _run_posted(self) -> None:
        os.read(self._wake_out, 4096)
        for _ in range(len(self._posted)):
            self._posted.popleft()()


def _pipe() -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    return ends
