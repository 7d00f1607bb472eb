"""The threads that read from the channels of all hosts, and write to them.

One thread reads from all channels. Writing to a channel and ending it may block, so the
threads of a pool do that, which grows while they block: a host whose cable is cut must
not keep others waiting. Knows no frames.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable

from tfcluster.launcher.growing_pool import GrowingPool
from tfcluster.light_dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Watch:
    """A descriptor to read from, and what to do; ``name`` is the name of a thread."""

    name: str
    descriptor: int
    ready: Callable[[], bool]
    """Reads what is there, in the reading thread; returns False at the end."""
    end: Callable[[], None]
    """Called after the end, in a thread of the pool; may close the descriptor."""


class ChannelThreads:
    """Safe to call from all threads. All its threads end by themselves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reader: _Reader | None = None
        self._pool = GrowingPool()

    def watch(self, watch: Watch) -> None:
        """Read from a descriptor until its end, in the reading thread."""
        with self._lock:
            if self._reader is None:
                self._reader = _Reader(self.run, self._is_over)
                target = self._reader.run
                threading.Thread(target=target, name="channels", daemon=True).start()
            self._reader.add(watch)

    def _is_over(self) -> bool:
        """Whether the reading thread, which watches nothing, may end."""
        with self._lock:
            if self._reader is not None and self._reader.has_new:
                return False
            self._reader = None
            return True

    def run(self, name: str, act: Callable[[], None]) -> None:
        """Call ``act``, which may block, in a thread of the pool; never blocks."""
        self._pool.run(name, act)


class _Reader:
    """Polls descriptors until there are none left and ``is_over`` agrees to that."""

    def __init__(
        self,
        run: Callable[[str, Callable[[], None]], None],
        is_over: Callable[[], bool],
    ) -> None:
        self._run_elsewhere = run
        self._is_over = is_over
        self._new: deque[Watch] = deque()
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)

    @property
    def has_new(self) -> bool:
        return bool(self._new)

    def add(self, watch: Watch) -> None:
        """Read from this descriptor, too. Other threads call this until ``is_over``."""
        self._new.append(watch)
        with contextlib.suppress(BlockingIOError):  # enough wake-ups are pending
            os.write(self._wake, b"w")

    def run(self) -> None:
        self._selector.register(self._woken, selectors.EVENT_READ)
        try:
            while not self._is_done():
                for key, _ in self._selector.select():
                    if key.data is None:
                        self._take_new()
                    elif not key.data.ready():
                        # Forget it first: afterwards its number may be reused.
                        self._selector.unregister(key.fd)
                        self._run_elsewhere(key.data.name, key.data.end)
        finally:
            self._selector.close()
            os.close(self._woken)
            os.close(self._wake)

    def _is_done(self) -> bool:
        watches_none = len(self._selector.get_map()) == 1
        return watches_none and not self._new and self._is_over()

    def _take_new(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 1 << 12)
        while self._new:
            watch = self._new.popleft()
            self._selector.register(watch.descriptor, selectors.EVENT_READ, watch)
