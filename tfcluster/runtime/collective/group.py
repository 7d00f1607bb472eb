"""The process group. Before each collective operation the ranks compare its signature.

So ranks whose programs have diverged get an error that says where, never wrong numbers.
Thread-safe; one exchange happens at a time. Knows nothing about tensors.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from tfcluster.protocol.task_events import Waiting
from tfcluster.runtime.collective.packing import CollectiveCall
from tfcluster.runtime.collective.peer_monitor import PeerMonitor
from tfcluster.runtime.collective.peer_reports import (
    ExitReport,
    Position,
    RankProgress,
    SignalMessage,
)
from tfcluster.runtime.collective.phases import (
    ExchangePhase,
    GraphProgress,
    RunningGraph,
)
from tfcluster.runtime.collective.rank_divergence import RankEnding, compared_at_end
from tfcluster.runtime.collective.signature import Signature, difference
from tfcluster.runtime.collective.transports.hierarchical import HostTransport
from tfcluster.runtime.errors import CollectiveError, CollectiveMismatchError
from tfcluster.runtime.files.order import enter_exchange
from tfcluster.runtime.signals import SIGNALS, Nearness
from tfcluster.runtime.telemetry.stack_dump import program_line
from tfcluster.runtime.telemetry.step_rate import ExchangeTotals
from tfcluster.runtime.telemetry.tracer import EXCHANGES, Tracer

_HEADER = struct.Struct(">Q32s8s")
"""The number of the exchange, the digest of its signature, and a rank's note."""
_MEETING = Signature("a meeting because of a signal").digest
_MOST_KEPT = 16
_OTHER_PROTOCOL = "a rank uses a different protocol version"


def copied(error: CollectiveError) -> CollectiveError:
    """An error of the same type and text, without a traceback."""
    return type(error)(str(error))


class Group:
    """The process group of all ranks, as one rank sees it.

    ``monitor`` is the failure detector: it finds out which ranks are late and why ranks
    have left. Without it, an error can only name the rank whose connection broke. If
    ``enter`` is given, ranks connect at the first exchange instead of now, and
    ``enter`` is called just before; it raises CollectiveError if this process must not
    take part. ``on_failure`` is called once with the error that ends the group.
    ``tracer`` records the exchanges; its clock must be ``clock``, which returns
    seconds. ``section`` is the section of signals around each exchange.
    """

    def __init__(
        self,
        transport: HostTransport,
        *,
        monitor: PeerMonitor | None = None,
        enter: Callable[[], None] | None = None,
        on_failure: Callable[[CollectiveError], None] = lambda error: None,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer | None = None,
        section: Callable[[], AbstractContextManager[None]] = lambda: SIGNALS,
    ) -> None:
        self._transport = transport
        self._section = section
        self.tracer = tracer
        """Records what this process does; None if nothing is recorded."""
        self._how = type(transport).__name__.removesuffix("Transport").lower()
        self._monitor = monitor
        self._on_failure = on_failure
        self._clock = clock
        # Reentrant, so that a nested exchange raises an error instead of hanging.
        self._lock = threading.RLock()
        self._phase = ExchangePhase(0, "", clock(), inside=False)
        self._graph: RunningGraph | None = None
        self._see: Callable[[str, float, float], None] | None = None
        self.totals = ExchangeTotals()
        """The cost of this rank's exchanges so far, by purpose."""
        self._foreign: str | None = None
        """The program's error that has ended the group; None if the error is ours."""
        self.failure: CollectiveError | None = None
        """The first error that ended the group; after that the group is unusable."""
        self._kept: deque[CollectiveError] = deque(maxlen=_MOST_KEPT)
        """Copies: an error's traceback would keep the program's objects alive."""
        self.steps: Callable[[], int] = lambda: 0
        """Training steps that this rank has done."""
        self.last_state: Callable[[], Mapping[str, str]] = dict
        """The state that ranks compare when programs end; see ``compared_at_end``."""
        self.last_equal: Callable[[], Mapping[str, int]] = dict
        self.met: Callable[[list[bytes]], None] = lambda notes: None
        """Called with the notes of ranks that ``meet`` while this one exchanges."""
        self.mismatch: CollectiveMismatchError | None = None
        """The last mismatch after which the ranks are still synchronised."""
        self._enter = enter
        self.begun = False
        """Whether this process has started to connect to the others."""
        if enter is None:
            self.begin()

    @property
    def rank(self) -> int:
        """This process's number among the ranks."""
        return self._transport.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._transport.size

    @property
    def waited_s(self) -> float:
        """Seconds this rank has spent waiting for other ranks so far."""
        return self._transport.waited_s

    @property
    def exchanged_bytes(self) -> int:
        """The bytes of data that this rank has contributed to exchanges so far.

        Bytes that ops in graphs exchange are not included.
        """
        return self._transport.exchanged_bytes

    @property
    def transport(self) -> HostTransport:
        """The transport that connects the ranks. It is used within exchanges only."""
        return self._transport

    def begin(self) -> None:
        """Start to connect to the other ranks, unless already started.

        Raises CollectiveError if this process must not take part.
        """
        with self._lock:
            if self.begun:
                return
            if self._enter is not None:
                self._enter()
            self.begun = True
            if self._monitor is not None:
                self._monitor.start(self._progress, self._transport.interrupt)

    def join(self) -> None:
        """Wait until all ranks are connected; only then can they learn why one leaves.

        Raises CollectiveError if they cannot be connected.
        """
        self.begin()
        if self._monitor is not None and not self._monitor.joined:
            self._monitor.join()

    @contextmanager
    def exchange(
        self, signature: Signature, note: bytes = b"", data: bytes = b""
    ) -> Iterator[CollectiveCall]:
        """Compare ``signature`` with all ranks; the body then uses the transport.

        ``note`` (at most eight bytes) and ``data`` may differ between the ranks; the
        call has those of every rank. Data go to every rank directly: a few KiB at most.

        Raises CollectiveMismatchError on every rank if the signatures differ; no data
        has been exchanged then. Raises PeerLostError if a rank is lost,
        CollectiveTimeoutError if one is late, and another CollectiveError if the ranks
        cannot be connected, if this process must not take part, or within another
        exchange of this thread. Any other exception from the body is passed on. After
        an error all later exchanges fail with it, except after a mismatch in the same
        exchange, which leaves all ranks in step.
        """
        with self._section(), self._lock:
            self._raise_failure()
            if self._phase.inside:
                raise CollectiveError(
                    f"{signature.what} was called within {self._phase.what}"
                )
            phase = ExchangePhase(
                self._phase.number + 1, signature.what, self._clock(), inside=True
            )
            self._phase = phase
            enter_exchange(phase.number, self.size)
            tracer = self.tracer
            waited_s = self._transport.waited_s if tracer is not None else 0.0
            arrived_s = 0.0
            bytes_before = headers_ended = self._transport.exchanged_bytes
            try:
                self.join()
                notes, received = self._agree(signature, note, data)
                headers_ended = self._transport.exchanged_bytes - len(data)
                if tracer is not None:
                    arrived_s = self._clock() - phase.since
                yield CollectiveCall(
                    self._transport, notes, tracer, self._how, received
                )
            except CollectiveError as error:
                if error is self.mismatch:
                    raise
                failure = self._failed(error)
                if failure is error:
                    raise
                raise failure from error
            except BaseException as error:
                # The other ranks are still in the exchange; this rank cannot rejoin it.
                broken = CollectiveError(f"{phase.exchange} was aborted: {error!r}")
                self._end(broken, kind=type(error).__name__)
                raise
            finally:
                ended_s = self._clock()
                self._phase = phase.ended(ended_s)
                exchanged = self._transport.exchanged_bytes
                self.totals.add(
                    phase.what, ended_s - phase.since, exchanged - bytes_before
                )
                if self._see is not None:
                    self._see(phase.what, phase.since, ended_s)
                if tracer is not None:
                    tracer.add(
                        EXCHANGES,
                        phase.what,
                        phase.since,
                        ended_s,
                        exchanged - headers_ended,
                        self._how,
                        self._transport.waited_s - waited_s,
                        arrived_s,
                    )

    # --- ``signals.Peers`` ------------------------------------------------------------

    @property
    def nearness(self) -> Nearness:
        """See ``signals.Peers``."""
        monitor = self._monitor
        if self.failure is not None or monitor is None or monitor.has_left:
            return Nearness.ALONE
        joined = self.begun and monitor.joined
        return Nearness.CONNECTED if joined else Nearness.CONNECTING

    def notify(self, number: int, count: int) -> None:
        """See ``signals.Peers``."""
        if self._monitor is not None:
            self._monitor.send(SignalMessage(number, count))

    def meet(self, note: Callable[[], bytes | None]) -> list[bytes] | None:
        """See ``signals.Peers``. An error ends the group, without a report of it."""
        with self._lock:
            self._raise_failure()
            note_here = note()
            if note_here is None:
                return None
            before = self._phase
            number = before.number + 1
            self._phase = ExchangePhase(number, "a signal", self._clock(), inside=True)
            try:
                _, digests, notes, _ = self._headers(number, _MEETING, note_here)
            except BaseException as error:
                self._end(CollectiveError(f"{error!r}"), kind=type(error).__name__)
                raise
            finally:
                self._phase = before
        return list(notes) if set(digests) == {_MEETING} else None

    # --- graphs with exchanges of their own -------------------------------------------

    def begin_graph(self, what: str, progress: Callable[[], GraphProgress]) -> None:
        """Record that a graph with its own exchanges is running now.

        Until ``end_graph``, ``progress`` says where this rank is; any thread may call
        it. ``what`` names the graph's exchanges. Late and lost ranks are noticed as in
        other exchanges, which may also take place meanwhile. Raises the error that has
        ended the group, and what ``join`` raises.
        """
        self._raise_failure()
        enter_exchange(self._phase.number + 1, self.size)
        self.join()
        self._graph = RunningGraph(what, progress, self._clock())

    def end_graph(self, ended: int) -> None:
        """Record that the graph has ended after ``ended`` of its own exchanges."""
        graph, self._graph = self._graph, None
        if graph is not None and ended:
            if self.tracer is not None:
                name = f"graph with {graph.what}"
                self.tracer.add(EXCHANGES, name, graph.since, self._clock(), ended)
            with self._lock:
                self._phase = ExchangePhase(
                    self._phase.number + ended, graph.what, self._clock(), inside=False
                )

    def graph_failed(self, error: CollectiveError, ended: int) -> CollectiveError:
        """End the group, because an exchange of the graph has failed.

        The graph had completed ``ended`` exchanges. Returns the root cause of
        ``error``.
        """
        with self._broken_off(ended):
            return self._failed(error)

    def graph_aborted(self, error: BaseException, reason: str, ended: int) -> None:
        """End the group, because the program has failed within the graph.

        Otherwise the other ranks would wait for this rank's remaining exchanges.
        ``reason`` is the text of ``error`` that they get.
        """
        kind = type(error).__name__
        with self._broken_off(ended):
            broken = f"{self._phase.exchange} was aborted: {kind}: {reason}"
            self._foreign = str(error)
            self._end(CollectiveError(broken), kind=kind)

    def stall_report(self) -> str:
        """A sentence that names the ranks for which this one waits; empty if unknown.

        Asks the other ranks, which takes at most two seconds.
        """
        return "" if self._monitor is None else self._monitor.inquire(self._progress())

    def observe(self, see: Callable[[str, float, float], None] | None) -> None:
        """Call ``see(what, start_s, end_s)`` after each exchange; None stops that.

        Times are in seconds, by this group's clock.
        """
        self._see = see

    def error_in(self, text: str) -> CollectiveError | None:
        """The group's error from which the TensorFlow error message ``text`` comes.

        None if that error is not from this group.
        """
        if self._foreign is not None and self._foreign in text:
            return None
        if self.failure is not None:
            return self.failure
        # Compare the text: the program may have caught these errors long ago.
        for kept in self._kept:
            if str(kept) in text:
                return copied(kept)
        mismatch = self.mismatch
        return mismatch if mismatch is not None and str(mismatch) in text else None

    def waiting(self) -> Waiting | None:
        """The exchange and ranks for which this rank is waiting; None if it is not.

        May be called from another thread.
        """
        phase, ranks = self._now, self._transport.waiting_for
        if phase.inside and not self._phase.inside:  # TensorFlow does not say which.
            ranks = tuple(rank for rank in range(self.size) if rank != self.rank)
        if self._monitor is not None:
            ranks = ranks or self._monitor.absent
        if not phase.inside or not ranks:
            return None
        return Waiting(self._clock() - phase.since, phase.exchange, ranks)

    def close(self, reason: str = "") -> None:
        """Leave the group; later calls do nothing.

        ``reason`` tells the others why this program has ended.
        """
        self._leave(ExitReport(self.completed, text=reason, steps=self.steps()))

    def end(self) -> RankEnding:
        """Leave the group at the end of a program that has succeeded.

        Returns whether the ranks that end after the same exchange have the same model.
        """
        ours = self.last_state() if self.begun and not self.failure else {}
        number = self.completed
        self._leave(ExitReport(number, steps=self.steps(), state=ours))
        if self._monitor is None or not ours:
            return RankEnding()
        others = self._monitor.left_with(number)
        states = {rank: report.state for rank, report in others.items()}
        return compared_at_end(self.rank, ours, states, self.last_equal())

    @property
    def _now(self) -> ExchangePhase:
        """This rank's current or last exchange, also within a graph."""
        phase, graph = self._phase, self._graph
        return phase if graph is None else graph.phase(phase)

    @contextmanager
    def _broken_off(self, ended: int) -> Iterator[None]:
        """A context in which this rank is in the exchange that ended its graph."""
        with self._lock:
            graph, self._graph = self._graph, None
            number = self._phase.number + ended + 1
            what = "" if graph is None else graph.what
            phase = ExchangePhase(number, what, self._clock(), inside=True)
            self._phase = phase
            try:
                yield
            finally:
                self._phase = phase.ended(self._clock())

    def _raise_failure(self) -> None:
        if self.failure is not None:
            # The original's traceback would grow with every attempt.
            raise copied(self.failure)

    @property
    def completed(self) -> int:
        """The number of the last exchange that this rank has completed."""
        phase = self._phase
        return phase.number - 1 if phase.inside else phase.number

    def _leave(self, report: ExitReport) -> None:
        if not self.begun:
            return
        if self._monitor is not None:
            self._monitor.leave(report)
        self._transport.close()

    def _progress(self) -> RankProgress:
        phase = self._now
        since_s = self._clock() - phase.since
        return RankProgress(phase.number, phase.what, since_s, phase.inside)

    def _agree(
        self, signature: Signature, note: bytes, data: bytes
    ) -> tuple[tuple[bytes, ...], tuple[memoryview, ...]]:
        """Exchange headers; return every rank's note and data, in rank order.

        Raises CollectiveMismatchError if the signatures differ.
        """
        number = self._phase.number
        while True:
            numbers, digests, notes, received = self._headers(
                number, signature.digest, note, data
            )
            if _MEETING not in digests:
                break
            pairs = zip(digests, notes, strict=True)
            self.met([note for digest, note in pairs if digest == _MEETING])
        if len(set(digests)) > 1 or len(set(numbers)) > 1:
            described = self._transport.allgather(signature.encoded())
            try:
                signatures = [Signature.decoded(data) for data in described]
            except (TypeError, ValueError) as error:
                raise CollectiveError(_OTHER_PROTOCOL) from error
            mismatch = CollectiveMismatchError(
                f"in exchange {number}, {difference(signatures)}"
            )
            if len(set(numbers)) == 1:
                self.mismatch = mismatch
            raise mismatch
        return notes, received

    def _headers(
        self, number: int, digest: bytes, note: bytes, data: bytes = b""
    ) -> tuple[
        tuple[int, ...], tuple[bytes, ...], tuple[bytes, ...], tuple[memoryview, ...]
    ]:
        """Every rank's header, that is its number, digest and note, and its data."""
        headers = self._transport.allgather(_HEADER.pack(number, digest, note) + data)
        try:
            numbers, digests, notes = zip(
                *map(_HEADER.unpack_from, headers), strict=True
            )
        except struct.error as error:
            raise CollectiveError(_OTHER_PROTOCOL) from error
        received = tuple(memoryview(header)[_HEADER.size :] for header in headers)
        return numbers, digests, notes, received

    def keep(self, error: CollectiveError) -> None:
        """Keep an error for ``error_in``: TensorFlow turns it into text in an op."""
        self._kept.append(copied(error))

    def _failed(self, error: CollectiveError) -> CollectiveError:
        """End the group; returns the root cause of ``error`` if the monitor has it."""
        phase = self._phase
        if self._monitor is not None:
            here = Position(self.rank, phase.exchange, self.steps(), program_line())
            error = self._monitor.verdict(error, phase.number, here)
        self._end(error, kind=type(error).__name__)
        if not isinstance(error, CollectiveMismatchError):
            error.args = (f"{error} (in {phase.exchange})",)
        self._on_failure(error)
        return error

    def _end(self, error: CollectiveError, kind: str) -> None:
        """Keep the error, report it to the other ranks, and disconnect."""
        if self._monitor is not None and self.begun:
            self._monitor.leave(ExitReport(self._phase.number, kind, str(error)))
        self.failure = error
        if not self.begun:
            return
        self._transport.interrupt()
        self._transport.close()
