"""Keeps the ranks in step: before an exchange they compare what they are about to do.

So ranks that have gone apart get an error that says where, never wrong numbers. Safe to
call from any thread; one exchange happens at a time. Knows no tensors.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from tfcluster.runtime.collective.failure_reports import Farewell, Here
from tfcluster.runtime.collective.peer_monitor import Board
from tfcluster.runtime.collective.rank_divergence import Ending, compared_at_end
from tfcluster.runtime.collective.signature import Layout, difference
from tfcluster.runtime.collective.straggler_messages import Standing
from tfcluster.runtime.collective.transports.base import Transport
from tfcluster.runtime.errors import CollectiveError, CollectiveMismatchError
from tfcluster.runtime.telemetry.agent_channel import Waiting
from tfcluster.runtime.telemetry.stack_dump import program_line

_HEADER = struct.Struct(">Q32sd8s")
"""Number of the exchange, digest of its layout, weight of this rank's contribution, and
its note."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An exchange that all ranks have agreed on and are now in."""

    transport: Transport
    weights: tuple[float, ...]
    notes: tuple[bytes, ...] = ()
    """What each rank has sent along, in rank order: eight bytes."""

    @property
    def share(self) -> float:
        """This rank's part of all weights, 0..1."""
        total = sum(self.weights)
        return self.weights[self.transport.rank] / total if total else 0.0


class _Stay(NamedTuple):
    """In an exchange, or out of it; read by other threads, so replaced as a whole."""

    number: int
    what: str
    since: float
    inside: bool

    @property
    def exchange(self) -> str:
        return f"exchange {self.number}: {self.what}"


class Group:
    """All ranks of the run, seen from one of them.

    ``board`` tells who keeps the others waiting, and why ranks have left; without one
    an error names only whom this rank was connected to. ``enter`` is called before
    anything is connected, which then waits for the first exchange; it may raise
    CollectiveError where this process must not take part.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        board: Board | None = None,
        enter: Callable[[], None] | None = None,
        on_failure: Callable[[CollectiveError], None] = lambda error: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._board = board
        self._on_failure = on_failure
        self._clock = clock
        # Reentrant, so that an exchange within another fails instead of hanging.
        self._lock = threading.RLock()
        self._stay = _Stay(0, "", clock(), inside=False)
        self._see: Callable[[str, float, float], None] | None = None
        self.failure: CollectiveError | None = None
        """The first error that ends it; the group is of no use after it."""
        self.refusal: CollectiveError | None = None
        """Why the program cannot be trained on all ranks, once a step has shown it."""
        self.steps: Callable[[], int] = lambda: 0
        """Training steps that this rank has done."""
        self.last_state: Callable[[], Mapping[str, str]] = dict
        """What this rank ends with; see ``consistency.compared_at_end``."""
        self.last_equal: Callable[[], Mapping[str, int]] = dict
        self.mismatch: CollectiveMismatchError | None = None
        """The last exchange that the ranks did not agree on; they are still in step."""
        self._enter = enter
        self._begun = False
        if enter is None:
            self.begin()

    @property
    def rank(self) -> int:
        return self._transport.rank

    @property
    def size(self) -> int:
        return self._transport.size

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for others since the start."""
        return self._transport.waited_s

    @property
    def begun(self) -> bool:
        """This process looks for the others, or has found them."""
        return self._begun

    def begin(self) -> None:
        """Look for the others, if that has not begun. Raises CollectiveError."""
        with self._lock:
            if self._begun:
                return
            if self._enter is not None:
                self._enter()
            self._begun = True
            if self._board is not None:
                self._board.start(self._standing, self._transport.interrupt)

    @contextmanager
    def exchange(
        self, layout: Layout, weight: float = 1.0, note: bytes = b""
    ) -> Iterator[Turn]:
        """Agree with all ranks on ``layout``, then use the turn's transport.

        The turn has every rank's ``note``, of eight bytes at most; it may differ.

        Raises CollectiveMismatchError on every rank where they don't agree: nothing
        has been exchanged then, and all may go on. Raises any other CollectiveError
        where a rank is lost or late, and all later exchanges fail with the same error.
        Anything else that is raised in between passes through, but is the end of the
        group as well.
        """
        with self._lock:
            if self.failure is not None:
                # A new one: the old one's traceback would grow with every attempt.
                raise type(self.failure)(str(self.failure))
            if self._stay.inside:
                raise CollectiveError(f"{layout.what} begins within {self._stay.what}")
            stay = _Stay(self._stay.number + 1, layout.what, self._clock(), inside=True)
            self._stay = stay
            try:
                self.begin()
                if self._board is not None and not self._board.joined:
                    self._board.join()
                yield Turn(self._transport, *self._agree(layout, weight, note))
            except CollectiveError as error:
                if error is self.mismatch:
                    raise
                failure = self._failed(error)
                if failure is error:
                    raise
                raise failure from error
            except BaseException as error:
                # The others are in the midst of it; there is no way back into step.
                broken = CollectiveError(f"{stay.exchange} broke off: {error!r}")
                self._end(broken, kind=type(error).__name__)
                raise
            finally:
                ended_s = self._clock()
                self._stay = _Stay(stay.number, stay.what, ended_s, inside=False)
                if self._see is not None:
                    self._see(stay.what, stay.since, ended_s)

    def observe(self, see: Callable[[str, float, float], None] | None) -> None:
        """Have ``see(what, start_s, end_s)`` called after each exchange, by the clock
        of this group; None ends it."""
        self._see = see

    def error_in(self, text: str) -> CollectiveError | None:
        """The error that TensorFlow has made ``text`` of, where it is one of ours."""
        if found := self.failure or self.refusal:
            return found
        # The program may have caught it long ago, and go on.
        mismatch = self.mismatch
        return mismatch if mismatch is not None and str(mismatch) in text else None

    def waiting(self) -> Waiting | None:
        """What this rank is waiting for, asked from another thread."""
        stay, ranks = self._stay, self._transport.waiting_for
        if self._board is not None:
            ranks = ranks or self._board.absent
        if not stay.inside or not ranks:
            return None
        return Waiting(self._clock() - stay.since, stay.exchange, ranks)

    def close(self, reason: str = "") -> None:
        """Hang up. ``reason``: why the program has ended, for those that go on."""
        self._leave(Farewell(self._stay.number, text=reason, steps=self.steps()))

    def end(self) -> Ending:
        """Hang up at the end of a program that has ended well.

        Says whether the ranks that end with this one have the same model.
        """
        ours = self.last_state() if self._begun and not self.failure else {}
        number = self._stay.number
        self._leave(Farewell(number, steps=self.steps(), state=ours))
        if self._board is None or not ours:
            return Ending()
        others = self._board.left_with(number)
        states = {rank: said.state for rank, said in others.items()}
        return compared_at_end(self.rank, ours, states, self.last_equal())

    def _leave(self, farewell: Farewell) -> None:
        if not self._begun:
            return
        if self._board is not None:
            self._board.leave(farewell)
        self._transport.close()

    def _standing(self) -> Standing:
        stay = self._stay
        since_s = self._clock() - stay.since
        return Standing(stay.number, stay.what, since_s, stay.inside)

    def _agree(
        self, layout: Layout, weight: float, note: bytes
    ) -> tuple[tuple[float, ...], tuple[bytes, ...]]:
        """Every rank's weight, and its note, in rank order."""
        number = self._stay.number
        header = _HEADER.pack(number, layout.digest, weight, note)
        headers = self._transport.allgather(header)
        try:
            numbers, digests, weights, notes = zip(
                *map(_HEADER.unpack, headers), strict=True
            )
        except struct.error as error:
            raise CollectiveError("a rank speaks another protocol") from error
        if len(set(digests)) > 1 or len(set(numbers)) > 1:
            described = self._transport.allgather(layout.encoded())
            layouts = [Layout.decoded(data) for data in described]
            mismatch = CollectiveMismatchError(
                f"in exchange {number}, {difference(layouts)}"
            )
            if len(set(numbers)) == 1:
                self.mismatch = mismatch
            raise mismatch
        return weights, notes

    def _failed(self, error: CollectiveError) -> CollectiveError:
        """What the failure is due to: that may be known better than by ``error``."""
        stay = self._stay
        if self._board is not None:
            here = Here(self.rank, stay.exchange, self.steps(), program_line())
            error = self._board.verdict(error, stay.number, here)
        self._end(error, kind=type(error).__name__)
        if not isinstance(error, CollectiveMismatchError):
            error.args = (f"{error} (in {stay.exchange})",)
        self._on_failure(error)
        return error

    def _end(self, error: CollectiveError, kind: str) -> None:
        """Remember the error, let the others know, and hang up."""
        if self._board is not None and self._begun:
            self._board.leave(Farewell(self._stay.number, kind, str(error)))
        self.failure = error
        if not self._begun:
            return
        self._transport.interrupt()
        self._transport.close()
