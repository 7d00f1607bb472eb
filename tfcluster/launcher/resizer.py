"""Resizes a running job: on request, and when a lost host answers again.

New hosts are prepared while the tasks train. Then all training tasks restart with the
new plan, when the epoch of ``fit`` ends: by then, the script has saved its state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Sequence

from tfcluster import schedulers
from tfcluster.base.errors import StartError
from tfcluster.base.light_dataclasses import dataclass, replace
from tfcluster.base.vocabulary import RANKED_TYPES
from tfcluster.launcher.agent_connection import Answered
from tfcluster.launcher.host_liveness import probe
from tfcluster.launcher.hosts import Hosts
from tfcluster.launcher.job import Job
from tfcluster.launcher.live_run import LiveRun
from tfcluster.lifecycle.events import Event, HostLost, Resize
from tfcluster.plan.host_patterns import fold, host_name_problem
from tfcluster.plan.model import Host, Strategy
from tfcluster.protocol import commands
from tfcluster.protocol.commands import ResizeCommand
from tfcluster.record.launched import save_resized
from tfcluster.schedulers.starting import Starter

MOST_WORKERS = 100_000
_WITH_SERVERS = (Strategy.PARAMETER_SERVER, Strategy.REPLICATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    workers: int
    hosts: tuple[Host, ...]
    """All hosts after the resize, in the order of the allocation; new ones last."""
    new: tuple[str, ...]
    """The hosts that must be prepared first."""
    job: Job
    """The job after the resize, as far as it is known before the resize."""


def plan_resize(
    job: Job, alive: Container[str], request: ResizeCommand
) -> Wanted | list[str]:
    """The resize that a request leads to on ``alive`` hosts, or why not."""
    problems = list(_never(job))
    added = _added(job, alive, request, problems)
    by_name = {host.name: host for host in added}
    hosts = [
        by_name.pop(host.name, host)
        for host in job.allocation.hosts
        if host.name in alive or host.name in by_name
    ]
    hosts += by_name.values()
    workers = _workers(job, added, request, problems)
    if problems or workers is None:
        return problems
    if not added and workers == job.description.tasks["worker"].count:
        return [f"there are {workers} workers already"]
    names = {host.name for host in added}
    listed = {host.name for host in job.description.hosts}
    more = (host for host in added if host.name not in listed)
    description = replace(job.description, hosts=(*job.description.hosts, *more))
    try:
        after = replace(job, description=description).resized(hosts, workers)
    except StartError as error:
        return [error.sentence]
    idle = names - {host.name for host in after.used_hosts()}
    if idle:
        return [
            f"{', '.join(sorted(idle))}: no task would run there with {workers} workers"
        ]
    new = tuple(host.name for host in added)
    return Wanted(workers=workers, hosts=tuple(hosts), new=new, job=after)


def _never(job: Job) -> Iterator[str]:
    strategy = job.description.runtime.strategy
    if strategy in _WITH_SERVERS or "ps" in job.description.tasks:
        yield f"a run with parameter servers cannot be resized (strategy {strategy})"
    elif job.plan().restart_alone:
        yield "its tasks do not restart together (restart.scope is task)"
    if "worker" not in job.description.tasks:
        yield "it has no workers"


def _added(
    job: Job, alive: Container[str], request: ResizeCommand, problems: list[str]
) -> list[Host]:
    scheduler = schedulers.get(job.description.backend)
    allocated = {host.name: host for host in job.allocation.hosts}
    used = {spec.place.host.name for spec in job.specs.values()}
    added: list[Host] = []
    for item in request.hosts:
        name, slots = item.host, item.slots
        if host_name_problem(name):
            problems.append(f"{name[:60]!r} is not a host name")
        elif slots is not None and not 0 < slots <= MOST_WORKERS:
            problems.append(f"{name}: {slots} is not a number of slots")
        elif scheduler.here:
            problems.append(f"{name}: backend {scheduler.name} has only this machine")
        elif name in used and name in alive:
            problems.append(f"{name} is a host of the run already")
        elif name not in allocated and not scheduler.lists_hosts:
            problems.append(f"{name}: the job does not have this host")
        elif any(name == host.name for host in added):
            problems.append(f"{name} is named twice")
        else:
            host = allocated.get(name) or Host(name=name)
            added.append(host if slots is None else replace(host, slots=slots))
    return added


def _workers(
    job: Job, added: Sequence[Host], request: ResizeCommand, problems: list[str]
) -> int | None:
    """The number of workers, or None with an entry in ``problems``."""
    group = job.description.tasks.get("worker")
    if group is None:
        return None
    workers = request.workers
    if workers is None:
        workers = group.count + sum(_share(job, host) for host in added)
    if not 1 <= workers <= MOST_WORKERS:
        problems.append(f"{workers} is not a number of workers")
        return None
    if group.min is not None and workers < group.min:
        problems.append(f"{workers} workers are fewer than 'min' ({group.min})")
    shards = job.description.runtime.shards
    ranks = workers + ("chief" in job.description.tasks)
    if shards is not None and ranks > shards:
        problems.append(f"{shards} shards are too few for {ranks} ranks")
    return workers


def _share(job: Job, host: Host) -> int:
    """How many workers a new host gets: its slots, or as many as the others have."""
    if host.slots is not None:
        return host.slots
    ranked = [spec for spec in job.specs.values() if spec.task.type in RANKED_TYPES]
    hosts = {spec.place.host.name for spec in ranked}
    return max(1, len(ranked) // max(1, len(hosts)))


FIRST_PROBE_S = 5.0
LONGEST_WAIT_S = 300.0


@dataclass(slots=True)
class _Pending:
    number: str | None
    """The number of the request; None: a host has come back."""
    wanted: Wanted
    until_s: float
    """When the new hosts must be ready."""
    at_once: bool
    epoch: int | None = None
    """The epoch that must end first."""
    ready: bool = False


@dataclass(slots=True)
class _Absent:
    """A lost host that may come back."""

    host: Host
    next_s: float
    wait_s: float
    asked: bool = False


class Resizer:
    """Makes at most one resize at a time. All times are from a monotonic clock."""

    def __init__(
        self,
        run: LiveRun,
        hosts: Hosts,
        starter: Starter,
        post: Callable[[Answered], None],
    ) -> None:
        self._run = run
        self._journal = run.journal
        self._hosts = hosts
        self._starter = starter
        self._post = post
        self._pending: _Pending | None = None
        self._let_go: list[HostLost] = []
        self._absent: dict[str, _Absent] = {}
        self._full: int | None = None
        """How many workers there were before a host was lost."""

    def begin(
        self,
        number: str | None,
        request: commands.ResizeCommand,
        alive: Container[str],
        now_s: float,
        *,
        trains: bool,
    ) -> list[str]:
        """Take or refuse a request; returns the hosts to add."""
        job = self._run.job
        target: Wanted | list[str]
        if not trains:
            target = ["it is not training now: try again when all tasks run"]
        elif self._pending is not None:
            target = ["another resize has not ended yet"]
        else:
            target = plan_resize(job, alive, request)
        if not isinstance(target, Wanted):
            if number is not None:
                self._journal.event("resize", request=number, problems=target)
            return []
        before = job.description.tasks["worker"].count
        self._journal.event(
            "resize",
            request=number,
            before=before,
            workers=target.workers,
            hosts=list(target.new),
        )
        until_s = now_s + job.description.start_timeout_s
        self._pending = _Pending(number, target, until_s, at_once=request.now)
        what = f"from {before} to {target.workers} workers"
        new = f"; preparing {fold(sorted(target.new))}" if target.new else ""
        self._run.say(f"resizing {what}{new}")
        if target.new:
            # Before agents start there, so that a sweep reaches them.
            with contextlib.suppress(OSError):
                save_resized(self._run.paths, target.job.description)
        return self._hosts.prepare_for(target.job)

    def due(self, now_s: float, *, trains: bool) -> list[Event]:
        """The events due now: ``Resize``, or hosts let go. Call it repeatedly."""
        resize = self._due(now_s) if trains else None
        let_go, self._let_go = self._let_go, []
        return [*let_go, resize] if resize else [*let_go]

    def failed(self, host: str, cause: str) -> None:
        if self._pending is not None and host in self._pending.wanted.new:
            self._give_up(f"{host}: {cause}")

    def _due(self, now_s: float) -> Resize | None:
        pending = self._pending
        if pending is None:
            return None
        if why := self._hosts.why_not_ready(pending.wanted.job):
            self._give_up(why)
            return None
        if not pending.ready:
            if not self._hosts.is_ready_for(pending.wanted.job):
                if now_s > pending.until_s:
                    self._give_up("its hosts were not ready after start_timeout")
                return None
            pending.ready = True
            pending.epoch = None if pending.at_once else self._epoch()
            if pending.epoch is not None:
                self._run.say(
                    f"all tasks will restart when epoch {pending.epoch} has ended"
                )
        epoch = self._epoch()
        if pending.epoch is not None and epoch is not None and epoch <= pending.epoch:
            return None
        workers = pending.wanted.workers
        return Resize(f"resizing: all tasks restart, with {workers} workers")

    def _epoch(self) -> int | None:
        """The lowest epoch of any task; None if no task is known to be in ``fit``."""
        reports = self._run.progress.snapshot().values()
        epochs = [e for report in reports if isinstance(e := report.get("epoch"), int)]
        return min(epochs, default=None)

    def job_on(self, left: Container[str]) -> Job | None:
        """The job after the resize, on the hosts that are left; None: impossible."""
        pending, job = self._pending, self._run.job
        if pending is None:
            return None
        hosts = [host for host in pending.wanted.hosts if host.name in left]
        described = pending.wanted.job.description.hosts
        job = replace(job, description=replace(job.description, hosts=described))
        try:
            after = job.resized(hosts, pending.wanted.workers)
        except StartError as error:
            self._give_up(error.message)
            return None
        if not self._hosts.is_ready_for(after):
            self._give_up("a host was lost in the meantime")
            return None
        return after

    def done(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        job = self._run.job
        workers = job.description.tasks["worker"].count
        hosts = [host.name for host in job.used_hosts()]
        self._journal.event(
            "resized", request=pending.number, workers=workers, hosts=hosts
        )
        for name in pending.wanted.new:
            self._absent.pop(name, None)
        if pending.number is not None or not self._absent:
            self._full = None
        self._run.say(f"resized to {workers} workers on {fold(hosts)}")

    def _give_up(self, why: str) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        self._journal.event("resized", request=pending.number, cause=why)
        self._run.say(f"not resized: {why}")
        not_needed = self._hosts.forget_plan()
        self._let_go += [
            HostLost(name, "the resize was given up") for name in not_needed
        ]

    def lost(self, host: Host, now_s: float, after_s: float) -> None:
        """Note a lost host, which may come back after ``after_s``."""
        if self._run.plan.min_training is None:
            return
        if self._full is None:
            self._full = self._run.job.description.tasks["worker"].count
        wait_s = max(FIRST_PROBE_S, after_s)
        self._absent[host.name] = _Absent(host, now_s + wait_s, wait_s)

    def probe(self, now_s: float) -> None:
        """Check now and then whether absent hosts answer."""
        if self._pending is not None:
            return
        for absent in self._absent.values():
            if not absent.asked and now_s >= absent.next_s:
                absent.asked = True
                probe(self._starter, absent.host, self._post)

    def answered(self, item: Answered, now_s: float) -> commands.ResizeCommand | None:
        absent = self._absent.get(item.host)
        if absent is None:
            return None
        absent.asked = False
        absent.wait_s = min(2 * absent.wait_s, LONGEST_WAIT_S)
        absent.next_s = now_s + absent.wait_s
        if not item.answers or self._full is None:
            return None
        self._run.say(f"{item.host} answers again")
        workers = self._full if len(self._absent) == 1 else None
        return commands.ResizeCommand(
            workers, (commands.NewHost(item.host, None),), now=False
        )
