"""Ranks of one host tell each other how far they are, through shared memory.

Each counts its steps in a number that the others watch. Who waits looks again and again
for a moment, letting others have the processor, and then sleeps until it is woken
through a pipe. Knows nothing of what a step is.
"""

from __future__ import annotations

import ctypes
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from tfcluster.runtime.errors import peer_lost, peers_late
from tfcluster.runtime.net.shm_segment import Arena

_SPIN_S = 500e-6
"""To be woken takes some ten microseconds; to keep a processor for long is unkind."""
_LOOKS = 50
"""At first without giving the processor away: the others are mostly about as far."""
_DRAIN_BYTES = 4096

# Not os.sched_yield: this one lets other threads of this process run meanwhile, too.
_yield: Callable[[], int] = ctypes.CDLL(None).sched_yield


class Pulse:
    """Member ``me`` of an arena; member m is rank ``ranks[m]``.

    ``wakers[m]`` is the writing end of member m's pipe, ``sleep`` the reading end of
    our own. ``lines[m]`` is a descriptor that hangs up when member m has left.
    """

    def __init__(
        self,
        arena: Arena,
        me: int,
        ranks: Sequence[int],
        *,
        sleep: int,
        wakers: Mapping[int, int],
        lines: Mapping[int, int],
    ) -> None:
        self._mine = arena.steps[me]
        self._asleep = arena.asleep[me]
        self._others = [m for m in range(arena.members) if m != me]
        self._steps = [arena.steps[m] for m in self._others]
        self._sleepers = [(arena.asleep[m], wakers[m]) for m in self._others]
        self._descriptors = [sleep, *wakers.values()]
        self._sleep = sleep
        self._member_of = {line: m for m, line in lines.items()}
        self._gone: set[int] = set()
        self._ranks = ranks
        self._fence = _Fence()
        self.step = int(self._mine[0])
        """How many steps this rank has done."""
        self.waited_s = 0.0
        self.waiting_for: tuple[int, ...] = ()
        self._poll = select.poll()
        self._poll.register(sleep, select.POLLIN)
        for line in lines.values():
            self._poll.register(line, select.POLLRDHUP)

    def done(self) -> None:
        """What was written before is there for whoever sees the step."""
        self.step += 1
        self._fence()
        self._mine[0] = self.step
        self._fence()
        for asleep, waker in self._sleepers:
            if asleep[0]:
                _wake(waker)

    def wait(self, step: int, timeout_s: float) -> None:
        """Return when every member has done so many steps.

        Raises PeerLostError, and CollectiveTimeoutError after ``timeout_s``.
        """
        if all(other[0] >= step for other in self._steps):
            self._fence()
            return
        began = time.monotonic()
        try:
            if not self._seen_soon(step, began):
                self._sleep_until(step, began + timeout_s, timeout_s)
        finally:
            self._asleep[0] = 0
            self.waiting_for = ()
            self.waited_s += time.monotonic() - began
        self._fence()

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []

    def _seen_soon(self, step: int, began: float) -> bool:
        for other in self._steps:
            looks = 0
            while other[0] < step:
                looks += 1
                if looks > _LOOKS:
                    _yield()
                    if time.monotonic() - began > _SPIN_S:
                        return False
        return True

    def _sleep_until(self, step: int, deadline: float, timeout_s: float) -> None:
        while True:
            self._asleep[0] = 1
            self._fence()
            missing = self._missing(step)
            if not missing:
                return
            self.waiting_for = tuple(self._ranks[member] for member in missing)
            # Whoever left after its last step is missed only with the next one.
            if left := self._gone.intersection(missing):
                raise peer_lost(self._ranks[min(left)])
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise peers_late(self.waiting_for, timeout_s)
            for descriptor, _ in self._poll.poll(left_s * 1000):
                if descriptor == self._sleep:
                    _drain(descriptor)
                else:
                    self._poll.unregister(descriptor)
                    self._gone.add(self._member_of[descriptor])

    def _missing(self, step: int) -> list[int]:
        return [
            member
            for member, other in zip(self._others, self._steps, strict=True)
            if other[0] < step
        ]


class _Fence:
    """What was written before is seen before what is written after; likewise reads.

    A lock that is released and taken again does that on every processor; x86 alone
    would need it only between a write and a read.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        self._lock.release()
        self._lock.acquire()


def pipe() -> tuple[int, int]:
    """Ends of a pipe to be woken through; nobody waits at either of them."""
    return os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)


def open_waker(pid: int, descriptor: int) -> int:
    """The writing end of a pipe that process ``pid`` has. Raises OSError."""
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(f"/proc/{pid}/fd/{descriptor}", flags)


def _wake(waker: int) -> None:
    # Full: it will wake. Gone: the others find out by its line.
    with suppress(OSError):
        os.write(waker, b"\0")


def _drain(descriptor: int) -> None:
    with suppress(BlockingIOError):
        os.read(descriptor, _DRAIN_BYTES)
