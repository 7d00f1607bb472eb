"""Fetches results for the launcher: at the end of the run, and on request.

Fetches run in a thread, one after the other. The launcher's loop passes on the frames
of hosts, and records what has become of each host's files.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from tfcluster import schedulers
from tfcluster.console.views.results import progress_text, result_lines
from tfcluster.file_patterns import pattern_problem
from tfcluster.launcher.job import CurrentJob, Job
from tfcluster.launcher.journal import Journal
from tfcluster.launcher.result_placement import ResultFolder
from tfcluster.launcher.result_transfer import (
    HostTransfer,
    Inbox,
    TransferOutcome,
    WantedFiles,
    run_all,
)
from tfcluster.launcher.run_output import RunOutput
from tfcluster.launcher.workdir_listing import witnesses
from tfcluster.light_dataclasses import dataclass, field
from tfcluster.protocol import commands
from tfcluster.protocol.messages import Message, OfResults
from tfcluster.protocol.requests import Request
from tfcluster.record.files import replace_json
from tfcluster.record.paths import RunPaths
from tfcluster.record.replay import results_view
from tfcluster.schedulers.base import Remembering

AT_ONCE = 8
"""How many hosts send their files at a time."""
STUCK_S = 90.0
"""A fetch in which nothing happens for this long is given up: a disk here may hang."""
PROGRESS_S = 0.5


@dataclass(slots=True)
class HostFetch:
    """One fetch, from some hosts."""

    number: str | None
    """The number of the request; None: the fetch at the end of the run."""
    outcomes: Mapping[str, TransferOutcome]
    transfers: Sequence[HostTransfer]
    stop: str | None = None
    """Why the fetch has to end early."""
    over: bool = False
    """Whether the thread has finished this fetch."""
    moved_s: float = field(default_factory=time.monotonic)
    steps: int = 0


class ResultsFetcher:
    """The fetches of one run. Every method is called from the launcher's one loop."""

    def __init__(
        self,
        current: CurrentJob,
        send: Callable[[str, Request], None],
        has_copy: Callable[[str], bool | None],
    ) -> None:
        """``has_copy`` returns whether a host works on a copy of the workdir; None:
        unknown."""
        self._current = current
        self._has_copy = has_copy
        self._paths = RunPaths(current.job.logs.parent)
        self._send = send
        self._inboxes: dict[str, Inbox] = {}
        self._lost: dict[str, str] = {}
        self._numbers = itertools.count(1)
        self._waiting: SimpleQueue[HostFetch] = SimpleQueue()
        self._fetches: list[HostFetch] = []
        self._thread: threading.Thread | None = None
        self._shown_s = 0.0

    # --- in -------------------------------------------------------------------------

    def received(self, host: str, message: Message) -> bool:
        """Take a message if it is about results; returns whether it was."""
        if not isinstance(message, OfResults):
            return False
        if host in self._inboxes:
            self._inboxes[host].put(message)
        return True

    def lost(self, host: str, cause: str) -> None:
        """Note that we have lost contact with a host."""
        self._lost[host] = cause
        if host in self._inboxes:
            self._inboxes[host].end(cause)

    def begin(self, number: str | None, request: commands.Fetch) -> HostFetch:
        """Begin a fetch, without the patterns that lead out of the workdir."""
        patterns, every = self._wanted(request)
        hosts = self._hosts(every=every)
        if schedulers.get(self._job.description.backend).here:
            outcomes = {
                host: TransferOutcome(host, shared=True, over=True) for host in hosts
            }
            fetch = HostFetch(number, outcomes, (), over=True)
            self._fetches.append(fetch)
            return fetch
        root = self._job.description.workdir
        seen = witnesses(root)
        outcomes = {host: TransferOutcome(host) for host in hosts}
        for host, outcome in outcomes.items():
            if self._has_copy(host) is False:
                outcome.shared = outcome.over = True
        fetch = HostFetch(number, outcomes, ())
        fetch.transfers = [
            HostTransfer(
                outcomes[host],
                self._asked(host, patterns, seen),
                ResultFolder(root, host, force=request.force, apart=every),
                send=self._sender(host),
                inbox=self._inbox(host),
                numbers=self._numbers,
                stopped=lambda: fetch.stop,
            )
            for host in hosts
            if not outcomes[host].over
        ]
        self._fetches.append(fetch)
        self._waiting.put(fetch)
        if self._thread is None:
            act = self._work
            self._thread = threading.Thread(target=act, name="results", daemon=True)
            self._thread.start()
        return fetch

    def skip(self, why: str) -> list[TransferOutcome]:
        """The outcomes of a fetch at the end that is skipped for this reason."""
        _, every = self._wanted(commands.Fetch())
        return [
            TransferOutcome(host, cause=why, over=True)
            for host in self._hosts(every=every)
        ]

    def leave(self, why: str) -> None:
        """End all fetches soon."""
        for fetch in self._fetches:
            fetch.stop = fetch.stop or why

    def _wanted(self, request: commands.Fetch) -> tuple[tuple[str, ...], bool]:
        configured = self._job.description.results
        patterns, every = request.patterns, request.all
        if not patterns and configured is not None:
            patterns = configured.patterns
        if every is None:
            every = configured is not None and configured.all
        return tuple(each for each in patterns if not pattern_problem(each)), every

    def _asked(
        self, host: str, patterns: tuple[str, ...], seen: tuple[tuple[str, int], ...]
    ) -> WantedFiles:
        description = self._job.description
        # What a host found out before its tasks were started is certain.
        if self._has_copy(host):
            seen = ()
        sync = description.sync
        folder = str(description.workdir) if sync is None else sync.folder
        return WantedFiles(folder, seen, patterns)

    def _hosts(self, *, every: bool) -> list[str]:
        """All hosts of the run, or only the host of the chief, which has rank 0."""
        everywhere = {**self._job.left_out, **self._job.specs}
        hosts = dict.fromkeys(spec.place.host.name for spec in everywhere.values())
        if every:
            return list(hosts)
        chief = self._job.ranks().get(0)
        if chief is None:
            return list(hosts)[:1]
        return [self._job.specs[chief].place.host.name]

    @property
    def run(self) -> str:
        return self._job.run

    @property
    def reachable_later(self) -> bool:
        """Whether hosts can be reached once the run is over."""
        scheduler = schedulers.get(self._job.description.backend)
        return isinstance(scheduler, Remembering)

    @property
    def folder(self) -> str:
        """The workdir here."""
        return str(self._job.description.workdir)

    @property
    def _job(self) -> Job:
        return self._current.job

    def _sender(self, host: str) -> Callable[[Request], None]:
        return lambda request: self._send(host, request)

    def _inbox(self, host: str) -> Inbox:
        if host not in self._inboxes:
            self._inboxes[host] = Inbox()
            if host in self._lost:
                self._inboxes[host].end(self._lost[host])
        return self._inboxes[host]

    # --- out ------------------------------------------------------------------------

    def finished(self, now_s: float) -> list[HostFetch]:
        """The fetches that have ended since the last call; shows progress."""
        ended = [fetch for fetch in self._fetches if fetch.over or _is_stuck(fetch)]
        for fetch in ended:
            self._fetches.remove(fetch)
        if self._fetches and now_s - self._shown_s >= PROGRESS_S:
            self._shown_s = now_s
            # Only for display: `fetch` waits for events.
            with suppress(OSError):
                fetch = self._fetches[0]
                value = {"request": fetch.number, "hosts": progress_of(fetch)}
                replace_json(self._paths.fetching, value, durable=False)
        return ended

    def text(self) -> str | None:
        """The progress of the current fetch; None if nothing is being fetched."""
        if not self._fetches:
            return None
        return progress_text(progress_of(self._fetches[0]))

    def _work(self) -> None:
        while True:
            fetch = self._waiting.get()
            run_all(fetch.transfers, AT_ONCE)
            fetch.over = True


def _is_stuck(fetch: HostFetch) -> bool:
    """Whether nothing has happened for STUCK_S; then the fetch is given up.

    A fetch that waits for the one before it is not stuck.
    """
    steps = sum(outcome.steps for outcome in fetch.outcomes.values())
    now = time.monotonic()
    if steps != fetch.steps or steps == 0:
        fetch.steps, fetch.moved_s = steps, now
    if now - fetch.moved_s < STUCK_S:
        return False
    fetch.stop = "the folder here does not respond"
    for outcome in fetch.outcomes.values():
        if not outcome.over:
            outcome.cause = fetch.stop
    return True


def progress_of(fetch: HostFetch) -> dict[str, dict[str, int]]:
    """By host: the number of bytes that are here, and of all bytes."""
    return {
        each.host: {"bytes": each.done_bytes, "of_bytes": each.bytes}
        for each in fetch.outcomes.values()
        if not each.over
    }


def event_fields(
    outcome: TransferOutcome, number: str | None, folder: str
) -> dict[str, Any]:
    """The keys of the event ``results``; ``folder`` is the workdir here."""
    return {
        "request": number,
        "host": outcome.host,
        "state": state_of(outcome),
        "folder": folder,
        "there": outcome.folder or None,
        "files": outcome.files,
        "bytes": outcome.bytes,
        "fetched": outcome.fetched,
        "unchanged": outcome.unchanged,
        "sent_bytes": outcome.sent_bytes,
        "kept": [list(pair) for pair in outcome.kept.named] or None,
        "growing": [list(pair) for pair in outcome.growing.named] or None,
        "missed": [list(pair) for pair in outcome.missed.named] or None,
        "missed_count": len(outcome.missed) or None,
        "cause": outcome.cause,
    }


def state_of(outcome: TransferOutcome) -> str:
    if outcome.shared:
        return "shared"
    return "fetched" if outcome.well else "incomplete"


CLOSE_S = 2.0
"""How long fetches may take to end when the run is over."""
_POLL_S = 0.02


class ResultRecorder:
    """The results of a run, with their events in the record."""

    def __init__(
        self, results: ResultsFetcher, journal: Journal, show: RunOutput
    ) -> None:
        self._results = results
        self._journal = journal
        self._show = show
        self._final: HostFetch | None = None

    def received(self, host: str, message: Message) -> bool:
        """Take a message if it is about results; returns whether it was."""
        return self._results.received(host, message)

    def lost(self, host: str, cause: str) -> None:
        """Note that we have lost contact with a host."""
        self._results.lost(host, cause)

    def text(self) -> str | None:
        """The progress of the current fetch; None if nothing is being fetched."""
        return self._results.text()

    def begin(self, number: str | None, request: commands.Fetch) -> HostFetch:
        """Begin a fetch; events ``results`` follow, one for each host."""
        fetch = self._results.begin(number, request)
        hosts = list(fetch.outcomes)
        self._journal.event("fetch", request=number, hosts=hosts)
        return fetch

    def at_end(self, not_now: str | None) -> None:
        """Begin the fetch at the end of the run, or say why there is none."""
        if not_now is None:
            self._final = self.begin(None, commands.Fetch())
            return
        self._results.leave(not_now)
        for outcome in self._results.skip(not_now):
            self._tell(outcome, None)

    def leave(self, why: str) -> None:
        """End all fetches soon."""
        self._results.leave(why)

    def close(self) -> None:
        """End all fetches, and record what they have achieved by then."""
        self._results.leave("the run has ended")
        until, pause = time.monotonic() + CLOSE_S, threading.Event()
        while self._results.text() is not None and time.monotonic() < until:
            self.finished(time.monotonic())
            pause.wait(_POLL_S)

    def finished(self, now_s: float) -> bool:
        """Record the fetches that have ended; returns whether the one at the end of the
        run is among them."""
        final = False
        for fetch in self._results.finished(now_s):
            final = final or fetch is self._final
            for outcome in fetch.outcomes.values():
                self._tell(outcome, fetch.number)
        return final

    def _tell(self, outcome: TransferOutcome, number: str | None) -> None:
        folder = self._results.folder
        fields = event_fields(outcome, number, folder)
        self._journal.event("results", **fields)
        if number is not None or outcome.shared:
            return
        for line in result_lines(results_view(fields)):
            self._show.say(line)
        if outcome.cause is not None and self._results.reachable_later:
            self._show.say(f"  hint: tfcluster fetch {self._results.run}")
