"""A pool of threads for work that may block, which grows only while its threads do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NamedTuple

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
            while (work := self._take()) is not None:
                threading.current_thread().name = work.name
                work.act()
        finally:
            with self._lock:
                self._size -= 1

    def _take(self) -> _Work | None:
        """The next work; None if there was none for so long that the thread may end."""
        try:
            work = self._handed_out.get(timeout=IDLE_S)
        except Empty:
            return None
        self._taken += 1
        return work
