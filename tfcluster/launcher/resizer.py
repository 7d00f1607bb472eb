"""Resizes a running job: on request, and when a lost host answers again.

New hosts are prepared while the tasks train. Then all training tasks restart with the
new plan, when the epoch of ``fit`` ends: by then, the script has saved its state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container

from tfcluster.base.errors import StartError
from tfcluster.base.light_dataclasses import dataclass, replace
from tfcluster.launcher.agent_connection import Answered
from tfcluster.launcher.host_liveness import probe
from tfcluster.launcher.hosts import Hosts
from tfcluster.launcher.job import Job
from tfcluster.launcher.live_run import LiveRun
from tfcluster.launcher.resize_request import Wanted, plan_resize
from tfcluster.lifecycle.events import Event, HostLost, Resize
from tfcluster.plan.host_patterns import fold
from tfcluster.plan.model import Host
from tfcluster.protocol import commands
from tfcluster.record.launched import save_resized
from tfcluster.schedulers.starting import Starter

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

    # --- requests -------------------------------------------------------------------

    def begin(
        self,
        number: str | None,
        request: commands.ResizeCommand,
        alive: Container[str],
        now_s: float,
        *,
        trains: bool,
    ) -> list[str]:
        """Take or refuse a request; returns the hosts to add.

        ``trains``: all tasks have started, and the run is not ending.
        """
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
        """The events due now: ``Resize``, or hosts that are let go. Call it repeatedly.

        ``trains``: nothing has happened that may restart or end the tasks.
        """
        resize = self._due(now_s) if trains else None
        let_go, self._let_go = self._let_go, []
        return [*let_go, resize] if resize else [*let_go]

    def failed(self, host: str, cause: str) -> None:
        """Give up if a new host cannot be prepared, or is lost."""
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
        """Note that the tasks start again with the new plan."""
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

    # --- hosts that come back -------------------------------------------------------

    def lost(self, host: Host, now_s: float, after_s: float) -> None:
        """Note that a host was lost. It may come back if the run goes on without it.

        ``after_s``: how long the processes there may still be alive.
        """
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
        """A request that adds the host again, if it has answered."""
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
