"""The thread that reads from the channels of all hosts. Knows no frames."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from collections.abc import Callable

from tfcluster.base.light_dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Watch:
    """A descriptor to read from, and what to do; ``name`` is the name of a thread."""

    name: str
    descriptor: int
    ready: Callable[[], bool]
    """Reads what is there, in the reading thread; returns False at the end."""
    end: Callable[[], None]
    """Called after the end, in a thread of its own; may close the descriptor."""


class ChannelReader:
    """Safe to call from all threads. Its thread ends when nothing is watched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: list[Watch] = []
        self._wake: int | None = None
        """Wakes the thread; None while there is none."""

    def watch(self, watch: Watch) -> None:
        """Read from a descriptor until its end, in the reading thread."""
        with self._lock:
            self._new.append(watch)
            if self._wake is not None:
                with contextlib.suppress(BlockingIOError):  # it is awake already
                    os.write(self._wake, b"w")
                return
            woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        act, args = self._read, (woken,)
        threading.Thread(target=act, args=args, name="channels", daemon=True).start()

    def _read(self, woken: int) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(woken, selectors.EVENT_READ)
            while self._watches_any(selector):
                for key, _ in selector.select():
                    if key.data is None:
                        os.read(woken, 1 << 12)
                    elif not key.data.ready():
                        # Forget it first: afterwards its number may be reused.
                        selector.unregister(key.fd)
                        name, end = key.data.name, key.data.end
                        threading.Thread(target=end, name=name, daemon=True).start()
        os.close(woken)

    def _watches_any(self, selector: selectors.BaseSelector) -> bool:
        """Begin to watch what is new; returns False if nothing is watched any more."""
        with self._lock:
            for watch in self._new:
                selector.register(watch.descriptor, selectors.EVENT_READ, watch)
            self._new.clear()
            if len(selector.get_map()) > 1 or self._wake is None:
                return True
            os.close(self._wake)
            self._wake = None
            return False
