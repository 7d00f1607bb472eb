"""The shared memory of the ranks on one host, and the counters that synchronise them.

The segment is a file that the first of these ranks creates and the others open: see
``memfd``. Each rank counts its steps in a counter that the others poll. A rank that
waits spins for a moment, yielding the processor, and then sleeps until it is woken
through a pipe. The module does not know what a step is.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np

from tfcluster.runtime.errors import peer_lost, peers_late
from tfcluster.runtime.files.opener import open_of
from tfcluster.runtime.net import memfd

SLOTS = 3
"""Number of pieces that may be in use at a time: see ``shm_allreduce``."""
_PIECE_BYTES = 1 << 19
_ROUND_BYTES = 1 << 21
"""Upper limit for all pieces of a round, so that they stay in a core's cache."""
_LINE_BYTES = 64
"""The size of a cache line. Each word that ranks poll has its own line."""


class ShmSegment:
    """The segment of ``members`` ranks; each rank writes only to its own parts.

    - ``steps[m]``, ``asleep[m]``: one number of member m (uint64, a memoryview)
    - ``lengths[m][slot]``: total bytes that member m has to send in a small all-gather
      (uint64, shape (SLOTS,))
    - ``pieces[m][slot]``: data from member m for others (uint8, shape
      (members * piece_bytes,))
    - ``results[m][slot]``: what member m has reduced (uint8, shape (piece_bytes,))
    """

    def __init__(self, descriptor: int, members: int) -> None:
        self.members = members
        self.piece_bytes = piece_bytes(members)
        self._memory = mmap.mmap(descriptor, _size(members))
        whole = np.frombuffer(self._memory, np.uint8)
        self._nonce = whole[: memfd.NONCE_BYTES]
        numbers = whole[_LINE_BYTES : _LINE_BYTES + _numbers_bytes(members)]
        lines = numbers.view(np.uint64).reshape(members, -1, _LINE_BYTES // 8)
        # Reading a memoryview is several times faster than reading an array item.
        self.steps = [lines[m, 0, :1].data for m in range(members)]
        self.asleep = [lines[m, 1, :1].data for m in range(members)]
        self.lengths = [lines[m, 2 : 2 + SLOTS, 0] for m in range(members)]
        start = _data_offset(members)
        data = whole[start:].reshape(members, SLOTS, -1)
        end = members * self.piece_bytes
        self.pieces = [[data[m, s, :end] for s in range(SLOTS)] for m in range(members)]
        self.results = [
            [data[m, s, end:] for s in range(SLOTS)] for m in range(members)
        ]

    @property
    def nonce(self) -> bytes:
        """Random bytes by which a rank verifies that it opened the right segment."""
        return self._nonce.tobytes()


def create(members: int) -> tuple[int, ShmSegment]:
    """Create a segment; return its descriptor, too. Raises OSError if that fails."""
    with memfd.created("tfcluster-ranks", _size(members)) as descriptor:
        return descriptor, ShmSegment(descriptor, members)


def attach(pid: int, descriptor: int, nonce: bytes, members: int) -> ShmSegment:
    """Open the segment that process ``pid`` has created.

    Raises OSError if it cannot be opened, or has the wrong size or nonce.
    """
    with memfd.opened(pid, descriptor, _size(members), nonce) as memory:
        return ShmSegment(memory, members)


def piece_bytes(members: int) -> int:
    """The maximum size of a rank's piece in a round; a multiple of every item size."""
    fair = _ROUND_BYTES // members // mmap.PAGESIZE * mmap.PAGESIZE
    return max(mmap.PAGESIZE, min(_PIECE_BYTES, fair))


def _numbers_bytes(members: int) -> int:
    return members * (2 + SLOTS) * _LINE_BYTES


def _data_offset(members: int) -> int:
    used = _LINE_BYTES + _numbers_bytes(members)
    return -(-used // mmap.PAGESIZE) * mmap.PAGESIZE


def _size(members: int) -> int:
    member_bytes = SLOTS * (members + 1) * piece_bytes(members)
    return _data_offset(members) + members * member_bytes


_SPIN_S = 500e-6
"""A wakeup takes tens of microseconds, but spinning for long would waste a core."""
_POLLS = 50
"""Polls before the first yield: the other ranks have usually progressed as far."""
_DRAIN_BYTES = 4096

# Not os.sched_yield: a call with ctypes also releases the GIL.
_sched_yield: Callable[[], int] = ctypes.CDLL(None).sched_yield


class ProgressCounters:
    """The progress counters of a segment, for member ``me``; member m is ``ranks[m]``.

    ``wakers[m]`` is the write end of member m's pipe, and ``wakeup`` is the read end of
    our own pipe. ``sockets[m]`` is a socket descriptor that reports a hang-up when
    member m has left. ``close`` closes the pipes. ``waited_s`` is the time spent
    waiting so far, in seconds, and ``waiting_for`` has the ranks missing right now.
    """

    def __init__(
        self,
        segment: ShmSegment,
        me: int,
        ranks: Sequence[int],
        *,
        wakeup: int,
        wakers: Mapping[int, int],
        sockets: Mapping[int, int],
    ) -> None:
        self._own_step = segment.steps[me]
        self._own_asleep = segment.asleep[me]
        self._others = [m for m in range(segment.members) if m != me]
        self._steps = [segment.steps[m] for m in self._others]
        self._sleepers = [(segment.asleep[m], wakers[m]) for m in self._others]
        self._descriptors = [wakeup, *wakers.values()]
        self._wakeup = wakeup
        self._member_of = {sock: m for m, sock in sockets.items()}
        self._disconnected: set[int] = set()
        self._ranks = ranks
        self._fence = _Fence()
        self.step = int(self._own_step[0])
        """The number of steps that this rank has done."""
        self.waited_s = 0.0
        self.waiting_for: tuple[int, ...] = ()
        self._poll = select.poll()
        self._poll.register(wakeup, select.POLLIN)
        for sock in sockets.values():
            self._poll.register(sock, select.POLLRDHUP)

    def done(self) -> None:
        """Count a step and wake sleeping members.

        A member that sees the step also sees everything that was written before it.
        """
        self.step += 1
        self._fence()
        self._own_step[0] = self.step
        self._fence()
        for asleep, waker in self._sleepers:
            if asleep[0]:
                _wake(waker)

    def wait(self, step: int, timeout_s: float) -> None:
        """Return when every member has done ``step`` steps.

        Raises PeerLostError if a missing member has left, and CollectiveTimeoutError
        after ``timeout_s`` seconds.
        """
        if all(other[0] >= step for other in self._steps):
            self._fence()
            return
        began = time.monotonic()
        try:
            if not self._spin_until(step, began):
                self._sleep_until(step, began + timeout_s, timeout_s)
        finally:
            self._own_asleep[0] = 0
            self.waiting_for = ()
            self.waited_s += time.monotonic() - began
        self._fence()

    def close(self) -> None:
        """Close the pipes; may be called twice."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []

    def _spin_until(self, step: int, began: float) -> bool:
        for other in self._steps:
            polls = 0
            while other[0] < step:
                polls += 1
                if polls > _POLLS:
                    _sched_yield()
                    if time.monotonic() - began > _SPIN_S:
                        return False
        return True

    def _sleep_until(self, step: int, deadline: float, timeout_s: float) -> None:
        while True:
            self._own_asleep[0] = 1
            self._fence()
            missing = self._missing(step)
            if not missing:
                return
            self.waiting_for = tuple(self._ranks[member] for member in missing)
            # A member that left after its last step matters only if it is missing.
            if lost := self._disconnected.intersection(missing):
                raise peer_lost(self._ranks[min(lost)])
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise peers_late(self.waiting_for, timeout_s)
            for descriptor, _ in self._poll.poll(left_s * 1000):
                if descriptor == self._wakeup:
                    _drain(descriptor)
                else:
                    self._poll.unregister(descriptor)
                    self._disconnected.add(self._member_of[descriptor])

    def _missing(self, step: int) -> list[int]:
        return [
            member
            for member, other in zip(self._others, self._steps, strict=True)
            if other[0] < step
        ]


class _Fence:
    """A full memory fence.

    Releasing and acquiring a lock is a full fence on every processor. On x86 it is
    needed only between a write and a read.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        self._lock.release()
        self._lock.acquire()


def pipe() -> tuple[int, int]:
    """The read and write ends of a wakeup pipe, both non-blocking. Raises OSError."""
    return os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)


def open_waker(pid: int, descriptor: int) -> int:
    """Open the write end of a pipe of process ``pid``. Raises OSError."""
    return open_of(pid, descriptor, os.O_WRONLY | os.O_NONBLOCK, "pipe:")


def _wake(waker: int) -> None:
    # EAGAIN: the pipe is full, so the member will wake anyway. EPIPE: the member has
    # left, which its socket reports.
    with suppress(OSError):
        os.write(waker, b"\0")


def _drain(descriptor: int) -> None:
    with suppress(BlockingIOError):
        os.read(descriptor, _DRAIN_BYTES)
