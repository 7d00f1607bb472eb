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
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NamedTuple

from tfcluster.base.light_dataclasses import dataclass


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


IDLE_S = 10.0
"""How long a thread waits for more work: longer than the interval of heartbeats."""
PATIENCE_S = 0.1
"""If the threads take no work for this long, others are added."""
GROWTH = 8
"""How many threads are added at once, at most."""


class _Work(NamedTuple):
    name: str
    act: Callable[[], None]


class GrowingPool:
    """Calls functions in threads, which end by themselves.

    It begins with one thread. ``run`` takes no lock and starts no thread, except for
    the first one, because both may take seconds while hundreds of other threads compete
    for the interpreter: a separate thread, the foreman, does all that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: SimpleQueue[_Work] = SimpleQueue()
        self._handed_out: SimpleQueue[_Work] = SimpleQueue()
        self._has_foreman = False
        self._size = 0
        self._taken = 0
        """Changes whenever work is taken; inexact, because it counts without a lock."""

    def run(self, name: str, act: Callable[[], None]) -> None:
        """Call ``act`` in a thread that has this name during the call; never blocks."""
        self._arrived.put(_Work(name, act))
        if self._has_foreman:
            return
        with self._lock:
            is_missing, self._has_foreman = not self._has_foreman, True
        if is_missing:
            threading.Thread(target=self._hand_out, name="pool", daemon=True).start()

    # --- the foreman ----------------------------------------------------------------

    def _hand_out(self) -> None:
        taken, since_s = self._taken, time.monotonic()
        while True:
            waiting = self._handed_out.qsize()
            try:
                work = self._arrived.get(timeout=PATIENCE_S if waiting else IDLE_S)
                self._handed_out.put(work)
            except Empty:
                if not waiting and self._may_leave():
                    return
            now_s = time.monotonic()
            if not waiting or taken != self._taken:
                taken, since_s = self._taken, now_s
            missing = 1 if self._size == 0 else 0
            if now_s - since_s > PATIENCE_S:
                missing, since_s = min(waiting, GROWTH), now_s
            for _ in range(missing):
                with self._lock:
                    self._size += 1
                threading.Thread(target=self._work_off, daemon=True).start()

    def _may_leave(self) -> bool:
        with self._lock:
            # ``run`` looks for a foreman after it has put its work.
            self._has_foreman = False
            self._has_foreman = not self._arrived.empty()
            return not self._has_foreman

    # --- the others -----------------------------------------------------------------

    def _work_off(self) -> None:
        try:
            while (work := self._next_work()) is not None:
                threading.current_thread().name = work.name
                work.act()
        finally:
            with self._lock:
                self._size -= 1

    def _next_work(self) -> _Work | None:
        """The next work; None if there was none for so long that the thread may end."""
        try:
            work = self._handed_out.get(timeout=IDLE_S)
        except Empty:
            return None
        self._taken += 1
        return work
