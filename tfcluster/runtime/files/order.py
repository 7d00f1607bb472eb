"""The order in which the ranks of a host change files: the chief comes last.

All ranks run the same program, so the n-th change of one is the n-th change of all. The
others make theirs in their own layers, where nobody sees it, and the chief waits for
that. So no rank ever sees a change of the chief that it has not made itself. Before a
rank removes something, it waits until the chief has made all changes before: otherwise,
the chief could still make later what the rank has removed, and the rank would see it.

The ranks share a few numbers in memory. The wait has no time limit, and needs none: it
ends as soon as another rank cannot make that change before the chief goes on, because
it has ended, or is at a point that all ranks pass and the chief has not reached. Then
the ranks' programs differ, and there is no order any more.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from contextlib import suppress

FOLDER = "TFCLUSTER_FILES"
"""The variable with the host's folder for the files of layers; only where all ranks of
the run have the same program."""

_WORDS = 8
"""The numbers of a rank, of eight bytes each; they fill a line of the cache."""
_STATE, _DONE, _POINTS, _EXCHANGE = range(4)
_ABLE, _UNABLE, _ENDED = 1, 2, 3
_SHORTEST_S, _LONGEST_S = 20e-6, 2e-3
_ALL = 1 << 62
"""More changes than any program makes."""
_LOOK_S = 0.1
"""How often a rank that waits checks that the others live."""


class Order:
    """This rank's numbers and those of the others on its host.

    Only the main thread of the process calls it, and no process that it forks.
    """

    def __init__(self, path: str, local_rank: int, local_size: int) -> None:
        """Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        # It stays open: its lock says that this process lives.
        self._file = os.open(path, flags, 0o600)
        size = 8 * _WORDS * local_size
        if os.fstat(self._file).st_size < size:
            os.ftruncate(self._file, size)
        self._words = memoryview(mmap.mmap(self._file, size)).cast("Q")
        self._own = local_rank * _WORDS
        self._others = [
            other * _WORDS for other in range(local_size) if other != local_rank
        ]
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._points = 0
        self.count = 0
        """The number of changes that this rank has begun."""

    def is_of_this_process(self) -> bool:
        """Whether this process has made the object, and is no child of that one."""
        return os.getpid() == self._process

    def is_here(self) -> bool:
        """Whether the caller is the main thread of the process."""
        here = threading.get_ident() == self._thread
        return here and os.getpid() == self._process

    def begin(self, *, is_able: bool) -> bool:
        """Wait for the other ranks to begin; returns whether all of them are able.

        ``is_able`` says whether this rank can have its own layer. Raises OSError.
        """
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, self._own)
        self._words[self._own + _STATE] = _ABLE if is_able else _UNABLE
        states = [self._state_of(other) for other in self._others]
        return is_able and _UNABLE not in states

    def done(self) -> None:
        """Say that all changes that have begun are made."""
        done = self._words[self._own + _DONE]
        self._words[self._own + _DONE] = max(done, self.count)

    def end(self) -> None:
        """Say that this rank changes nothing any more."""
        if os.getpid() == self._process:
            self._words[self._own + _STATE] = _ENDED

    def leave(self) -> list[int]:
        """Say that this rank begins again; returns descriptors that must stay open.

        If one of them were closed, this rank's lock would end.
        """
        for word in (_DONE, _POINTS, _EXCHANGE):
            self._words[self._own + word] = 0
        path = f"/proc/self/fd/{self._file}"
        return [
            int(entry.name)
            for entry in os.scandir("/proc/self/fd")
            if os.path.exists(entry.path) and os.path.samefile(entry.path, path)  # noqa: PTH110, PTH121
        ]

    def pass_point(self) -> None:
        """Say that this rank is at a point that all ranks pass in the same order.

        A rank may wait for others only at such points.
        """
        if self.is_here():
            self._points += 1
            self.done()
            self._words[self._own + _POINTS] = self._points

    def enter_exchange(self, number: int, size: int) -> None:
        """Say that this rank has come to an exchange of ``size`` ranks; any thread."""
        if size == len(self._others) + 1 and os.getpid() == self._process:
            if self.is_here():
                self.done()
            self._words[self._own + _EXCHANGE] = number

    def _is_ahead(self, other: int) -> bool:
        """Whether another rank is at a point that this rank has not reached."""
        return (
            self._words[other + _POINTS] > self._points
            or self._words[other + _EXCHANGE] > self._words[self._own + _EXCHANGE]
            or self._words[other + _STATE] == _ENDED
        )

    def _state_of(self, other: int) -> int:
        wait_s = _SHORTEST_S
        while not self._words[other + _STATE]:
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_S)
        return self._words[other + _STATE]

    def wait(self) -> bool:
        """Wait until the other ranks have made this rank's last change.

        Returns False if one of them cannot, because it makes other changes.
        """
        waits = [self._wait_for(other, self.count) for other in self._others]
        return all(waits)

    def wait_for_first(self) -> None:
        """Wait until the first rank has made all changes before this rank's last one.

        Or until it is clear that it makes other changes.
        """
        self._wait_for(0, self.count - 1)

    def _wait_for(self, other: int, count: int) -> bool:
        wait_s, looked_s = _SHORTEST_S, time.monotonic()
        while True:
            # In this order: a rank makes its changes before it passes a point.
            is_ahead = self._is_ahead(other)
            if self._words[other + _DONE] >= count or is_ahead:
                return self._words[other + _DONE] >= count
            if time.monotonic() - looked_s > _LOOK_S:
                if not self._lives(other):
                    return self._words[other + _DONE] >= count
                looked_s = time.monotonic()
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_S)

    def _lives(self, other: int) -> bool:
        """Whether the other rank still has its lock."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, other)
        except OSError:
            return True
        with suppress(OSError):
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, other)
        return False


_order: Order | None = None


def path_in(folder: str, attempt: int) -> str:
    """The path of the file with the ranks' numbers."""
    return f"{folder}/order-{attempt}"


def train_here(attempt: int, local_rank: int) -> None:
    """To be called in the process that trains as a rank, before it joins the others.

    If that is a child of the program's process, the others no longer wait for changes
    of that process: it may wait until the child has ended, and the child for them.
    """
    folder = os.environ.get(FOLDER)
    if folder is None or (_order is not None and _order.is_of_this_process()):
        return
    with suppress(OSError, ValueError):
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(path_in(folder, attempt), flags)
        try:
            words = memoryview(mmap.mmap(file, 0)).cast("Q")
        finally:
            os.close(file)
        words[local_rank * _WORDS + _DONE] = _ALL


def set_current(order: Order | None) -> None:
    """Let ``pass_point`` count for this order."""
    global _order
    _order = order


def pass_point() -> None:
    """To be called where a rank may wait for the others; see ``Order.pass_point``."""
    if _order is not None:
        _order.pass_point()


def enter_exchange(number: int, size: int) -> None:
    """To be called before each exchange; see ``Order.enter_exchange``."""
    if _order is not None:
        _order.enter_exchange(number, size)
