"""Fetches results for the launcher: at the end of the run, and on request.

Fetches run in threads, one after the other. The launcher's loop passes on the frames
of hosts, and records what has become of each host's files.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from tfcluster import schedulers
from tfcluster.base.light_dataclasses import dataclass, field
from tfcluster.console.views.status import progress_text, result_lines
from tfcluster.launcher.hosts import Hosts
from tfcluster.launcher.job import Job
from tfcluster.launcher.live_run import LiveRun
from tfcluster.launcher.result_placement import ResultFolder
from tfcluster.launcher.result_transfer import (
    HostTransfer,
    Inbox,
    TransferOutcome,
    WantedFiles,
    run_all,
)
from tfcluster.launcher.workdir_listing import witnesses
from tfcluster.plan.model import pattern_problem
from tfcluster.protocol import commands
from tfcluster.protocol.messages import Message, ResultsMessage
from tfcluster.record.files import replace_json
from tfcluster.record.replay import results_view

AT_ONCE = 8
"""How many hosts send their files at a time."""
STUCK_S = 90.0
"""A fetch in which nothing happens for this long is given up: a disk here may hang."""
SHOWN = 20
"""How many files each list of an event names; the rest are only counted."""
PROGRESS_S = 0.5
CLOSE_S = 2.0
"""How long fetches may take to end when the run is over."""
_POLL_S = 0.02


@dataclass(slots=True)
class HostFetch:
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
    """The fetches of one run, with their events; for the launcher's one loop."""

    def __init__(self, run: LiveRun, hosts: Hosts) -> None:
        self._run = run
        self._hosts = hosts
        self._inboxes: defaultdict[str, Inbox] = defaultdict(Inbox)
        self._fetches: list[HostFetch] = []
        self._final: HostFetch | None = None
        """The fetch at the end of the run."""
        self._one_at_a_time = threading.Lock()
        self._shown_s = 0.0

    def received(self, host: str, message: Message) -> bool:
        """Take a message if it is about results; returns whether it was."""
        if not isinstance(message, ResultsMessage):
            return False
        if host in self._inboxes:
            self._inboxes[host].put(message)
        return True

    def lost(self, host: str, cause: str) -> None:
        self._inboxes[host].end(cause)

    def begin(self, number: str | None, request: commands.Fetch) -> HostFetch:
        """Begin a fetch; events ``results`` follow, one for each host."""
        fetch = self._prepared(number, request)
        self._run.journal.event("fetch", request=number, hosts=list(fetch.outcomes))
        self._fetches.append(fetch)
        if not fetch.over:
            work = partial(self._work, fetch)
            threading.Thread(target=work, name="results", daemon=True).start()
        return fetch

    def _prepared(self, number: str | None, request: commands.Fetch) -> HostFetch:
        """A fetch without the patterns that lead out of the workdir."""
        patterns, every = self._wanted(request)
        description, files = self._job.description, self._hosts.files
        here = schedulers.get(description.backend).here
        outcomes = {}
        for host in self._chosen_hosts(every=every):
            shared = here or files.has_copy(host) is False
            outcomes[host] = TransferOutcome(host, shared=shared, over=shared)
        root, sync = description.workdir, description.sync
        folder = str(root) if sync is None else sync.folder
        fetch = HostFetch(number, outcomes, (), over=here)
        for host, outcome in outcomes.items():
            if outcome.over:
                continue
            # What a host found out before its tasks were started is certain.
            seen = () if files.has_copy(host) else witnesses(root)
            transfer = HostTransfer(
                outcome,
                WantedFiles(folder, seen, patterns),
                ResultFolder(root, host, force=request.force, apart=every),
                send=partial(self._hosts.send, host),
                inbox=self._inboxes[host],
                stopped=lambda: fetch.stop,
            )
            fetch.transfers = (*fetch.transfers, transfer)
        return fetch

    def at_end(self, not_now: str | None) -> None:
        """Begin the fetch at the end of the run, or say why there is none."""
        if not_now is None:
            self._final = self.begin(None, commands.Fetch())
            return
        self.leave(not_now)
        _, every = self._wanted(commands.Fetch())
        for host in self._chosen_hosts(every=every):
            self._record(TransferOutcome(host, cause=not_now, over=True), None)

    def leave(self, why: str) -> None:
        for fetch in self._fetches:
            fetch.stop = fetch.stop or why

    def _wanted(self, request: commands.Fetch) -> tuple[tuple[str, ...], bool]:
        configured = self._job.description.results
        patterns, every = request.patterns, request.all
        if not patterns and configured is not None:
            patterns = configured.patterns
        if every is None:
            every = configured is not None and configured.all
        return tuple(p for p in patterns if not pattern_problem(p)), every

    def _chosen_hosts(self, *, every: bool) -> list[str]:
        everywhere = {**self._job.left_out, **self._job.specs}
        hosts = dict.fromkeys(spec.place.host.name for spec in everywhere.values())
        if every:
            return list(hosts)
        chief = self._job.ranks().get(0)
        if chief is None:
            return list(hosts)[:1]
        return [self._job.specs[chief].place.host.name]

    @property
    def _job(self) -> Job:
        return self._run.job

    def finished(self, now_s: float) -> bool:
        """Record and show fetches; returns whether the final one has ended."""
        ended = [fetch for fetch in self._fetches if fetch.over or _is_stuck(fetch)]
        for fetch in ended:
            self._fetches.remove(fetch)
        if self._fetches and now_s - self._shown_s >= PROGRESS_S:
            self._shown_s = now_s
            # Only for display: `fetch` waits for events.
            with suppress(OSError):
                fetch = self._fetches[0]
                value = {"request": fetch.number, "hosts": progress_of(fetch)}
                replace_json(self._run.paths.fetching, value, durable=False)
        for fetch in ended:
            for outcome in fetch.outcomes.values():
                self._record(outcome, fetch.number)
        return any(fetch is self._final for fetch in ended)

    def close(self) -> None:
        self.leave("the run has ended")
        until, pause = time.monotonic() + CLOSE_S, threading.Event()
        while self._fetches and time.monotonic() < until:
            self.finished(time.monotonic())
            pause.wait(_POLL_S)

    def _record(self, outcome: TransferOutcome, number: str | None) -> None:
        description = self._job.description
        fields = event_fields(outcome, number, str(description.workdir))
        self._run.journal.event("results", **fields)
        if number is not None or outcome.shared:
            return
        for line in result_lines(results_view(fields)):
            self._run.show.say(line)
        reachable_later = schedulers.get(description.backend).lists_hosts
        if outcome.cause is not None and reachable_later:
            self._run.show.say(f"  hint: tfcluster fetch {self._job.run}")

    def text(self) -> str | None:
        """The progress of the current fetch; None if nothing is being fetched."""
        if not self._fetches:
            return None
        return progress_text(progress_of(self._fetches[0]))

    def _work(self, fetch: HostFetch) -> None:
        with self._one_at_a_time:
            run_all(fetch.transfers, AT_ONCE)
        fetch.over = True


def _is_stuck(fetch: HostFetch) -> bool:
    """Whether nothing has happened for STUCK_S, unless it waits for another fetch."""
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
        outcome.host: {"bytes": outcome.done_bytes, "of_bytes": outcome.bytes}
        for outcome in fetch.outcomes.values()
        if not outcome.over
    }


def event_fields(
    outcome: TransferOutcome, number: str | None, folder: str
) -> dict[str, Any]:
    state = "fetched" if outcome.well else "incomplete"
    return {
        "request": number,
        "host": outcome.host,
        "state": "shared" if outcome.shared else state,
        "folder": folder,
        "there": outcome.folder or None,
        "files": outcome.files,
        "bytes": outcome.bytes,
        "fetched": outcome.fetched,
        "unchanged": outcome.unchanged,
        "sent_bytes": outcome.sent_bytes,
        "kept": _rows(outcome.kept),
        "growing": _rows(outcome.growing),
        "missed": _rows(outcome.missed),
        "missed_count": len(outcome.missed) or None,
        "cause": outcome.cause,
    }


def _rows(files: Sequence[tuple[str, str]]) -> list[list[str]] | None:
    return [[path, why] for path, why in files[:SHOWN]] or None
