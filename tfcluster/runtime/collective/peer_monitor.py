"""The failure and straggler detector: which ranks have left, why, and which are late.

A thread keeps a connection to every other rank, separate from the connections for the
exchanges. It sleeps as long as there is no problem, so it adds no cost to an exchange.
The texts of the messages are in ``peer_reports``.
"""

from __future__ import annotations

import _thread
import hmac
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from tfcluster.protocol.frames import encode
from tfcluster.protocol.task_events import Waiting
from tfcluster.protocol.wire import Decoder, WireError
from tfcluster.runtime.collective.peer_reports import (
    FIRST_EXCHANGES,
    Answer,
    Exit,
    ExitReport,
    Heard,
    PeerMessage,
    Position,
    Query,
    RankProgress,
    ReadyMessage,
    SignalMessage,
    awaited_text,
    cannot_succeed,
    decode,
    inquiry_text,
    is_reporter,
    missing,
    patience_s,
    possible_causes,
    stalled_text,
    unconnected_text,
    verdict,
)
from tfcluster.runtime.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    PeerLostError,
)
from tfcluster.runtime.net.rendezvous import Member, connect
from tfcluster.runtime.telemetry.agent_channel import reporter
from tfcluster.runtime.telemetry.stack_dump import stacks_text

_ANSWER_S = 2.0
"""A rank that does not answer for this long is suspended or dead."""
_LOOKS_PER_WARNING = 8
_MAX_SLEEP_S = 5.0
_GRACE_S = 0.3
"""A process may exit as soon as its own part of an exchange is complete; the others
finish theirs within this time."""
_EVIDENCE_S = 0.5
"""How long an error may wait for the reports that explain it."""
_MAX_TEXT = 4000
_DEAD_AFTER = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_USER_TIMEOUT": 60_000}
"""Keepalive detects a host that lost power within a minute, even if idle."""


def to_stderr(text: str) -> None:
    """Write a line to descriptor 2: a stuck thread may hold the lock of sys.stderr."""
    with suppress(OSError):
        os.write(2, f"tfcluster: {text}\n".encode())


class PeerMonitor:
    """The failure detector of one rank.

    ``addresses`` are ``host:port`` in rank order. ``say`` prints warnings: they name
    the missing ranks after ``warning_s`` seconds (None: never), and again each time the
    wait has doubled. ``join_timeout_s`` is in seconds.

    A rank is lost when its connection breaks, at the latest after TCP_USER_TIMEOUT (RFC
    5482); in the terms of Chandra and Toueg, "Unreliable Failure Detectors for Reliable
    Distributed Systems", 1996, it is complete, and accurate as long as connections do
    not break. Late ranks are named as by Horovod's stall inspector
    (horovod/common/stall_inspector.cc).
    """

    def __init__(
        self,
        me: Member,
        addresses: Sequence[str],
        *,
        join_timeout_s: float,
        warning_s: float | None,
        say: Callable[[str], None] = to_stderr,
    ) -> None:
        # A separate token distinguishes these connections from the transport's, which
        # are made to the same address.
        token = hmac.digest(me.token, b"peer monitor", "sha256")
        self._me = replace(me, token=token)
        self._addresses = tuple(addresses)
        self._join_timeout_s = join_timeout_s
        self._warning_s = warning_s or math.inf
        self._say = say
        self._progress: Callable[[], RankProgress] = lambda: RankProgress(
            0, "", 0.0, False
        )
        self._interrupt: Callable[[], None] = lambda: None
        self.told: Callable[[int, int], None] = lambda number, count: None
        """Called by the thread for a signal that another rank has got."""
        self._joining: tuple[str, float] | None = None
        """The purpose of the join in progress, and when it began."""
        self._pid = os.getpid()
        self._changed = threading.Condition()
        # The fields below are guarded by _changed.
        self._found: dict[int, socket.socket] = {}
        self._ready: set[int] = set()
        self._join_error: CollectiveError | None = None
        self._died: dict[int, float] = {}
        self._exit_reports: dict[int, ExitReport] = {}
        self._answers: dict[int, RankProgress] = {}
        self._heard_by: set[int] = set()
        """Ranks that know that this one has left."""
        self._closed = False
        # Only the monitor's thread uses the fields below.
        self._warned_of = (0, 0.0)
        self._asked: tuple[int, float] | None = None
        self._stalled_report = (0, "")
        """The last slow exchange, and the report about it."""
        self._shown_for = 0
        self.joined = me.size == 1
        """Whether every rank runs a monitor and is connected to all others."""

    def start(
        self, progress: Callable[[], RankProgress], interrupt: Callable[[], None]
    ) -> None:
        """Start the thread, which connects to the other ranks.

        The thread calls ``progress`` for the progress of this rank, and ``interrupt``
        to make an exchange fail that cannot be completed.
        """
        self._progress, self._interrupt = progress, interrupt
        # Not in __init__: a process forked before this call may itself become the rank.
        self._pid = os.getpid()
        if self._me.size > 1:
            threading.Thread(
                target=self._run, daemon=True, name="tfcluster-monitor"
            ).start()

    def enter(self, generation: int) -> None:
        """Set the generation of ranks to which this one belongs; before ``start``."""
        self._me = replace(self._me, generation=generation)

    def join(self) -> None:
        """Return when all ranks are connected; warn about missing ranks meanwhile.

        Raises CollectiveTimeoutError after ``join_timeout_s``, and CollectiveError if
        the ranks cannot be connected.
        """
        began = time.monotonic()
        warn_at = patience_s(1, self._warning_s)
        while not self.joined:
            with self._changed:
                if self._join_error is not None:
                    raise self._join_error
                waited_s = time.monotonic() - began
                if waited_s > self._join_timeout_s:
                    raise CollectiveTimeoutError(
                        unconnected_text(self.absent, self._join_timeout_s)
                    )
                if not self.joined and waited_s < warn_at:
                    left_s = min(warn_at, self._join_timeout_s) - waited_s
                    self._changed.wait(min(left_s, _MAX_SLEEP_S))
                    continue
            if not self.joined:
                text = unconnected_text(self.absent, waited_s)
                self._say(f"{text}; {self._causes()}")
                warn_at *= 2

    @contextmanager
    def joining(self, what: str) -> Iterator[None]:
        """Join, and supervise the body, which connects the ranks by other means.

        ``what`` names the purpose in messages. The body runs outside of an exchange but
        is supervised like one: late ranks are named, and a lost rank ends it. Raises
        what ``join`` raises, and a CollectiveError of the body with its root cause.
        """
        self._joining = what, time.monotonic()
        try:
            self.join()
            yield
        except CollectiveError as error:
            raise self.verdict(error, self._where().number) from error
        finally:
            self._joining = None

    @property
    def absent(self) -> tuple[int, ...]:
        """The ranks that have not connected yet, as far as this one can tell."""
        if self.joined:
            return ()
        missing = set(range(self._me.size)) - {self._me.rank} - set(self._found)
        if not missing:
            return tuple(sorted(set(self._found) - self._ready))
        # Lower ranks are dialled in order, so ranks after the first missing one are
        # not known.
        lower = min(missing)
        return (lower,) if lower < self._me.rank else tuple(sorted(missing))

    def verdict(
        self, error: CollectiveError, number: int, here: Position | None = None
    ) -> CollectiveError:
        """The root cause of ``error`` in exchange ``number``, or ``error`` itself.

        For a timeout, the names of the missing ranks are added.
        """
        if isinstance(error, CollectiveTimeoutError):
            told_of, text = self._stalled_report
            if told_of == number:
                return CollectiveTimeoutError(f"{error}; {text}")
        if not isinstance(error, PeerLostError):
            return error

        def cause() -> CollectiveError | None:
            return verdict(number, self._died, self._exit_reports, here)

        with self._changed:
            self._changed.wait_for(lambda: cause() or not self.joined, _EVIDENCE_S)
            return cause() or error

    def inquire(self, progress: RankProgress) -> str:
        """Ask all ranks where they are, and name the ranks for which this one waits.

        ``progress`` is this rank's progress. Must not be called by the monitor's
        thread; takes ``_ANSWER_S`` at most. The names are added to a later timeout; see
        ``verdict``.
        """
        self._query(progress)
        asked = set(self._found)

        def is_answered() -> bool:
            return not asked - set(self._answers) - self._left()

        with self._changed:
            self._changed.wait_for(is_answered, _ANSWER_S)
            others = {rank: self._answers.get(rank) for rank in self._found}
            reports = self._exit_reports.items()
            failed = {rank: report.text for rank, report in reports if report.failed}
        text = inquiry_text(progress, others, failed)
        self._stalled_report = progress.number, text
        return text

    def send(self, message: PeerMessage) -> None:
        """Send a message to all ranks."""
        for connection in self._found.values():
            _send(connection, message)

    @property
    def has_left(self) -> bool:
        """Whether this rank or another one has left, or cannot be reached."""
        return self._closed or self._join_error is not None or bool(self._left())

    def _left(self) -> set[int]:
        return {*self._died, *self._exit_reports}

    def leave(self, report: ExitReport) -> None:
        """Send the report to all ranks and disconnect; later calls do nothing.

        In a forked child, only the child's copies of the connections are closed.
        """
        if os.getpid() != self._pid:
            # Without the lock: the thread may have held it at the time of the fork.
            for connection in self._found.values():
                connection.close()
            return
        with self._changed:
            if self._closed:
                return
            self._closed = True
            connections = dict(self._found)
        last = Exit(replace(report, text=report.text[:_MAX_TEXT]))
        for connection in connections.values():
            _send_whole(connection, last)
        if report.state:
            self._wait_until_heard(set(connections))
        for connection in connections.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

    def left_with(self, number: int) -> dict[int, ExitReport]:
        """The reports of the ranks that ended without an error after this exchange."""
        with self._changed:
            return {
                rank: report
                for rank, report in self._exit_reports.items()
                if not report.failed and report.number == number
            }

    def _wait_until_heard(self, ranks: set[int]) -> None:
        """Wait until every rank has confirmed our report or left, up to a time limit.

        So if two ranks end, the rank that ends later has the report of the other.
        """

        def is_heard() -> bool:
            return not ranks - self._heard_by - self._left()

        with self._changed:
            self._changed.wait_for(is_heard, _ANSWER_S)

    def _where(self) -> RankProgress:
        """This rank's progress; ``joining`` counts as being in the next exchange."""
        progress, joining = self._progress(), self._joining
        if progress.inside or joining is None:
            return progress
        what, since = joining
        since_s = time.monotonic() - since
        return RankProgress(progress.number + 1, what, since_s, inside=True)

    # --- the thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            connect(
                self._me,
                self._addresses,
                timeout_s=self._join_timeout_s,
                sockets=self._found,
            )
        except (CollectiveError, OSError) as error:
            with self._changed:
                self._join_error = (
                    error
                    if isinstance(error, CollectiveError)
                    else CollectiveError(f"the ranks cannot be connected: {error}")
                )
                self._changed.notify_all()
            return
        poll = select.poll()
        decoders = {rank: Decoder() for rank in self._found}
        ranks = {}
        for rank, connection in self._found.items():
            _prepare(connection)
            ranks[connection.fileno()] = rank
            poll.register(connection, select.POLLIN)
            _send(connection, ReadyMessage())
        while ranks or not self._closed:
            for descriptor, _ in poll.poll(self._sleep_s() * 1000):
                rank = ranks[descriptor]
                if not self._received(rank, decoders[rank]):
                    poll.unregister(descriptor)
                    del ranks[descriptor]
                    self._found[rank].close()
            self._check()

    def _sleep_s(self) -> float:
        if self._asked or self._left():
            return _GRACE_S / 3
        return min(self._warning_s / _LOOKS_PER_WARNING, _MAX_SLEEP_S)

    def _received(self, rank: int, frames: Decoder) -> bool:
        """Handle what a rank has sent; False if it has disconnected."""
        try:
            data = self._found[rank].recv(65536)
            for frame in frames.feed(data):
                self._process(rank, decode(frame))
        except BlockingIOError:
            return True
        except (OSError, WireError):
            data = b""
        if not data:
            with self._changed:
                if rank not in self._exit_reports:
                    self._died[rank] = time.monotonic()
                self._changed.notify_all()
        return bool(data)

    def _process(self, rank: int, message: PeerMessage) -> None:
        match message:
            case Query(asked):
                self._answer(rank, asked)
                return
            case SignalMessage(number, count):
                self.told(number, count)
                return
        with self._changed:
            match message:
                case Answer(progress):
                    self._answers[rank] = progress
                case Exit(report):
                    self._exit_reports[rank] = report
                    _send(self._found[rank], Heard())
                case Heard():
                    self._heard_by.add(rank)
                case ReadyMessage():
                    self._ready.add(rank)
                    self.joined = len(self._ready) == self._me.size - 1
            self._changed.notify_all()

    def _answer(self, rank: int, asked: RankProgress) -> None:
        """Send our progress; if we are late, also print our stack traces."""
        progress = self._where()
        _send(self._found[rank], Answer(progress))
        if progress.has_come_to(asked.number) or self._shown_for == asked.number:
            return
        self._shown_for = asked.number
        awaited = awaited_text(rank, asked.since_s, asked.exchange)
        self._say(f"{awaited}. It is here:\n{stacks_text(_thread.get_ident())}")

    def _check(self) -> None:
        """Interrupt the current exchange if it cannot succeed; query if it is slow."""
        progress, now = self._where(), time.monotonic()
        if not progress.inside or not progress.number:
            self._asked = None
            return
        number = progress.number
        with self._changed:
            lost = progress.since_s > _GRACE_S and any(
                now - since > _GRACE_S for since in self._died.values()
            )
            doomed = lost or cannot_succeed(number, self._exit_reports)
        if doomed:
            # On every check: the exchange may only now have reached its wait.
            self._interrupt()
            return
        if self._asked is not None:
            self._report_stall(progress, now)
            return
        warned, at_s = self._warned_of
        due_s = 2 * at_s if warned == number else patience_s(number, self._warning_s)
        if progress.since_s >= due_s and self.joined:
            self._warned_of = number, progress.since_s
            self._asked = number, now + _ANSWER_S
            self._query(progress)

    def _causes(self) -> str:
        hosts = [address.rpartition(":")[0].strip("[]") for address in self._addresses]
        return possible_causes(os.environ, hosts, connected=self.joined)

    def _query(self, progress: RankProgress) -> None:
        with self._changed:
            self._answers.clear()
        self.send(Query(progress))

    def _report_stall(self, progress: RankProgress, now: float) -> None:
        """Report the missing ranks once all have answered or the time is up."""
        if self._asked is None or self._asked[0] != progress.number:
            self._asked = None
            return
        with self._changed:
            others = {rank: self._answers.get(rank) for rank in self._found}
        if None in others.values() and now < self._asked[1]:
            return
        self._asked = None
        absent = missing(progress.number, others)
        if absent and progress.since_s < self._warning_s:
            return  # A rank is late with its first exchange, but not very late yet.
        text = stalled_text(progress, others)
        if not absent and progress.number <= FIRST_EXCHANGES:
            text = f"{text}; {self._causes()}"
        self._stalled_report = progress.number, text
        if is_reporter(self._me.rank, progress.number, others):
            self._say(text)
            if absent:
                waiting = Waiting(progress.since_s, progress.what, tuple(absent))
                reporter().send(waiting)


def _prepare(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _DEAD_AFTER.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _send(connection: socket.socket, message: PeerMessage) -> None:
    """Send without blocking, or drop it: the peer may not be reading."""
    with suppress(OSError):
        connection.send(encode(message), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)


def _send_whole(connection: socket.socket, message: PeerMessage) -> None:
    """Send what may exceed the socket's buffer, for at most ``_ANSWER_S``."""
    data = memoryview(encode(message))
    deadline = time.monotonic() + _ANSWER_S
    poll = select.poll()
    with suppress(OSError, ValueError):
        poll.register(connection, select.POLLOUT)
        while data and time.monotonic() < deadline:
            poll.poll(_GRACE_S * 1000)
            with suppress(BlockingIOError):
                flags = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
                data = data[connection.send(data, flags) :]
