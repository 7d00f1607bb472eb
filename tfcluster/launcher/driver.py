"""The launcher's main loop: takes events, calls ``step``, performs actions.

Other threads only put items on the queue; every decision and every change of state is
made here, in the thread that called ``run``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Container, Iterable, Sequence
from queue import Empty, SimpleQueue

from tfcluster.base.errors import ExitCode, StartError
from tfcluster.base.light_dataclasses import as_dict
from tfcluster.base.states import TaskState
from tfcluster.base.task_id import TaskId
from tfcluster.launcher.agent_connection import (
    LEASE_S,
    Answered,
    Closed,
    Opened,
    Unopened,
)
from tfcluster.launcher.host_facts import Measured
from tfcluster.launcher.hosts import Hosts
from tfcluster.launcher.job import Item, Job
from tfcluster.launcher.live_run import LiveRun
from tfcluster.launcher.resizer import Resizer
from tfcluster.launcher.results import ResultsFetcher
from tfcluster.launcher.stacks import StallDetector, ask_stacks
from tfcluster.launcher.task_files import LogCopies, TraceFiles
from tfcluster.launcher.task_messages import TaskMessages
from tfcluster.launcher.task_starts import TaskStarts
from tfcluster.lifecycle import actions, begin, events, step
from tfcluster.lifecycle.state import START, HostState, Phase, Plan
from tfcluster.plan.host_patterns import fold
from tfcluster.protocol import commands
from tfcluster.protocol.frames import ProtocolError
from tfcluster.protocol.messages import Clock, Hello, Making
from tfcluster.protocol.requests import StopRequest
from tfcluster.record.crash import save_crash
from tfcluster.record.requests import pop_requests
from tfcluster.schedulers.starting import Starter

TICK_S = 0.25
PROGRESS_S = 1.0
COPIES_S = 5.0
"""How long writing the last log copies may take."""


_HOST_WORDS = {
    events.HostReady: "ready",
    events.HostFailed: "failed",
    events.HostLost: "lost",
    events.HostClosed: "closed",
}


class Driver:
    def __init__(
        self,
        run: LiveRun,
        starter: Starter,
        queue: SimpleQueue[Item],
        earlier: Sequence[float],
    ) -> None:
        """``earlier``: Unix times of restarts in previous runs that still count."""
        self._run = run
        self._queue = queue
        self._journal = run.journal
        self._show = run.show
        self._hosts = hosts = Hosts(run, starter, queue.put)
        self._traces = TraceFiles(run.paths)
        self._copies = LogCopies(run.paths)
        self._tasks = TaskMessages(run, hosts.facts, self._copies, self._traces)
        self._clocks: dict[str, Measured] = {}
        """The last recorded measurements, by host."""
        self._deadlines: dict[str, float] = {}
        self._stalls = StallDetector(run, self._tasks.answers, hosts.send)
        self._results = ResultsFetcher(run, hosts)
        self.restarts = list(earlier)
        """Unix times of the restarts so far, ``earlier`` included."""
        self._resizer = Resizer(run, hosts, starter, queue.put)
        self._starts = TaskStarts(run, hosts, self._tasks.cold)
        self._finish: actions.Finish | None = None
        self._fault: Exception | None = None
        self._last = self._served = time.monotonic()

    @property
    def _job(self) -> Job:
        return self._run.job

    @property
    def _plan(self) -> Plan:
        return self._run.plan

    def run(self) -> actions.Finish:
        """Run the job to its end; nothing that happens on hosts raises."""
        now_s = time.time()
        ago = [max(0.0, now_s - t_s) for t_s in self.restarts]
        self._state, first = begin(self._plan, ago)
        self._perform(first)
        for used in self._job.used_hosts():
            self._journal.event("host", host=used.name, state="starting")
        self._hosts.open()
        while self._finish is None:
            try:
                self._run_once()
            except Exception as error:
                self._faulty(error)
        self._results.close()
        self._record_progress()
        if unswept := self._hosts.finish():
            self._show.say(
                f"warning: {fold(unswept)} could not be swept after contact was lost; "
                f"a live agent ends its tasks within {LEASE_S:g} s"
            )
        if trouble := self._copies.close(COPIES_S):
            self._show.say(f"warning: cannot copy logs: {trouble}")
        if trouble := self._traces.close(COPIES_S):
            self._show.say(f"warning: the trace is incomplete: {trouble}")
        for host, count in self._hosts.sweeps.swept.items():
            self._journal.event("swept", host=host, count=count)
        return self._finish

    def _run_once(self) -> None:
        self._wait()
        now = time.monotonic()
        # If the launcher itself was suspended, that time must not count as silence.
        elapsed, self._last = min(now - self._last, 2 * TICK_S), now
        self._expire(now)
        for event in self._hosts.elapsed(elapsed):
            self._feed(event)
        self._hosts.ping()
        if now - self._served >= PROGRESS_S:
            self._record_progress()
            self._served = now
            self._serve()
        if self._results.finished(now):
            self._feed(events.ResultsFetched())
        self._watch(now)
        self._show.live(self._journal.view, now, self._results.text)

    def _record_progress(self) -> None:
        progress = self._run.progress
        self._journal.progress(progress.snapshot(), progress.attempts())

    def _faulty(self, error: Exception) -> None:
        """End the run in order because of a bug in tfcluster; raise a second one."""
        if self._fault is not None:
            raise error
        self._fault = error
        where = save_crash(error, os.environ)
        kept = f" (see {where})" if where else ""
        cause = f"{type(error).__name__}: {error}"
        self._feed(events.LauncherFault(f"internal error in tfcluster: {cause}{kept}"))

    def _wait(self) -> None:
        now = time.monotonic()
        soonest = min(self._deadlines.values(), default=now + TICK_S)
        try:
            item = self._queue.get(timeout=max(0.0, min(TICK_S, soonest - now)))
            # Limited: a flood of logs must not hold up deadlines and heartbeats.
            until = time.monotonic() + TICK_S
            while self._finish is None:
                for event in self._events(item):
                    self._feed(event)
                if time.monotonic() > until:
                    return
                item = self._queue.get_nowait()
        except Empty:
            pass

    def _events(self, item: Item) -> Iterable[events.Event]:
        if isinstance(item, events.Interrupted):
            return [item]
        if isinstance(item, Closed):
            return self._hosts.closed(item)
        if isinstance(item, Answered):
            self._hosts.silence.answered(item)
            request = self._resizer.answered(item, time.monotonic())
            return [] if request is None else self._resize(None, request)
        if isinstance(item, Opened | Unopened):
            return self._hosts.opened(item)
        host, message = item.host, item.message
        if isinstance(message, Clock):
            self._clock(host, message, item.heard_s)
            return []
        try:
            if self._results.received(host, message):
                self._hosts.silence.heard(host)
                return []
            results = self._hosts.received(host, message)
            if results is None:
                results = self._tasks.received(host, message, time.monotonic())
        except ProtocolError as error:
            return [events.HostLost(host, f"its agent violated the protocol: {error}")]
        if isinstance(message, Making):
            self._making(host, message.text)
        if isinstance(message, Hello):
            about = {"cpus": message.cpus, "gpus": list(message.gpus)}
            self._journal.event("machine", host=host, python=message.python, **about)
            if self._job.description.runtime.trace:
                # Whatever tasks record carries the time of their host's clock.
                self._hosts.ask_clock(host)
        return results

    def _clock(self, host: str, clock: Clock, heard_s: float) -> None:
        measured = Measured.of(clock.monotonic_s, clock.asked_s, heard_s)
        if measured.says_more_than(self._clocks.get(host)):
            self._clocks[host] = measured
            self._journal.event("clock", host=host, **as_dict(measured))

    def _making(self, host: str, text: str | None) -> None:
        if START in self._deadlines:
            later = time.monotonic() + self._job.description.start_timeout_s
            self._deadlines[START] = later
        if text is not None:
            self._run.say(f"{host}: {text}")

    def _feed(self, event: events.Event) -> None:
        if isinstance(event, events.HostEvent):
            self._note_host(event)
        before = self._state.restarts
        self._state, due = step(self._state, event)
        if self._state.restarts > before:
            self.restarts.append(time.time())
        self._perform(due)

    def _note_host(self, event: events.HostEvent) -> None:
        host, cause = event.host, getattr(event, "cause", None)
        word = _HOST_WORDS[type(event)]
        self._journal.event("host", host=host, state=word, cause=cause)
        if not isinstance(event, events.HostReady):
            self._results.lost(host, cause or "its agent has ended")
        if isinstance(event, events.HostLost | events.HostFailed):
            self._resizer.failed(host, event.cause)
        if isinstance(event, events.HostLost) and host in self._plan.hosts():
            lost = next(h for h in self._job.used_hosts() if h.name == host)
            self._resizer.lost(lost, time.monotonic(), event.harmless_after_s)

    def _expire(self, now: float) -> None:
        for name in [n for n, at in self._deadlines.items() if at <= now]:
            self._deadlines.pop(name, None)
            self._feed(events.Expired(name))

    def _running(self) -> dict[TaskId, str]:
        tasks = self._state.tasks
        return {
            task: host
            for task, host in self._plan.tasks.items()
            if tasks[task].state is TaskState.RUNNING
        }

    def _serve(self) -> None:
        """Handle the requests of other commands."""
        for number, request in pop_requests(self._run.paths):
            match request:
                case commands.StacksCommand(tasks):
                    running, send = self._running(), self._hosts.send
                    ask_stacks(number, tasks, running, send, self._journal)
                case commands.Fetch():
                    self._results.begin(number, request)
                case commands.ResizeCommand():
                    for event in self._resize(number, request):
                        self._feed(event)
        self._resizer.probe(time.monotonic())

    def _resize(
        self, number: str | None, request: commands.ResizeCommand
    ) -> list[events.Event]:
        state = self._state
        alive = [h for h, word in state.hosts.items() if word is HostState.READY]
        trains = state.phase is Phase.TRAINING and state.started and not state.success
        added = self._resizer.begin(
            number, request, alive, time.monotonic(), trains=trains
        )
        for host in added:
            self._journal.event("host", host=host, state="starting")
        return [events.HostAdded(host) for host in added]

    def _watch(self, now: float) -> None:
        state, running = self._state, self._running()
        well = state.verdict is None and state.interrupted is None
        if stalled := self._stalls.check(now, running, well=well):
            self._feed(stalled)
        trains = state.phase is Phase.TRAINING and not state.pending
        for event in self._resizer.due(now, trains=trains):
            self._feed(event)

    def _perform(self, due: Iterable[actions.Action]) -> None:
        for action in due:
            match action:
                case actions.StartTasks(tasks, attempts):
                    for event in self._starts.start(tasks, attempts):
                        self._feed(event)
                case actions.Replan(hosts):
                    self._plan_again(hosts)
                case actions.StopTasks(tasks, signal, grace_s):
                    self._stop(tasks, signal, grace_s)
                case actions.FetchResults(_, not_now):
                    self._results.at_end(not_now)
                case actions.LeaveResults(why):
                    self._results.leave(why)
                case actions.CloseHosts(hosts, grace_s):
                    self._hosts.close(hosts, grace_s)
                case actions.DropHosts(hosts):
                    self._hosts.drop(hosts)
                case actions.SetDeadline(name, after_s):
                    self._deadlines[name] = time.monotonic() + after_s
                case actions.ClearDeadline(name):
                    self._deadlines.pop(name, None)
                case actions.Say(text):
                    self._run.say(text)
                case actions.SetRunState(state, reason):
                    # A final state is recorded only in the record's last event: until
                    # then `stop` would have to sweep if this process died.
                    if not state.final:
                        journal = self._journal
                        journal.event("state", state=str(state), reason=reason)
                case actions.SetTaskState():
                    self._task_state(action)
                case actions.Failure():
                    self._failure(action)
                case actions.Finish():
                    self._finish = action

    def _plan_again(self, left: Container[str]) -> None:
        """Plan for the remaining hosts; a resize may have added some, too."""
        after = self._resizer.job_on(left) if self._state.resizing else None
        try:
            if after is None:
                self._run.current.adopt(self._job.on_fewer(left))
            else:
                self._run.current.adopt(self._starts.located(after))
        except StartError as error:
            self._feed(events.LauncherFault(error.message, ExitCode.START))
            return
        self._hosts.adopt_plan()
        self._starts.replanned(new_hosts=after is not None)
        if after is not None:
            self._resizer.done()
        self._feed(events.Replanned(self._plan))

    def _stop(self, tasks: tuple[TaskId, ...], signal: str, grace_s: float) -> None:
        by_host: dict[str, list[str]] = {}
        for task in tasks:
            by_host.setdefault(self._plan.tasks[task], []).append(str(task))
        for host, names in by_host.items():
            self._hosts.send(host, StopRequest(tuple(names), grace_s, signal))

    def _task_state(self, change: actions.SetTaskState) -> None:
        if change.state.final or change.state is TaskState.STOPPING:
            self._run.progress.ended(change.task)
        facts = self._tasks.facts(change.task, change.attempt)
        if change.state is TaskState.STARTING:
            facts = {"address": self._starts.address(change.task)}
            if change.attempt:  # it may be new, or on another host than before
                facts["host"] = self._plan.tasks[change.task]
                facts["log"] = self._job.log(change.task)
        self._journal.event(
            "task",
            task=str(change.task),
            attempt=change.attempt,
            state=str(change.state),
            exit_code=change.exit_code,
            signal=change.signal,
            cause=change.cause,
            **facts,
        )

    def _failure(self, failure: actions.Failure) -> None:
        task = failure.task
        self._journal.event(
            "failure",
            task=None if task is None else str(task),
            host=failure.host,
            exit_code=failure.exit_code,
            signal=failure.signal,
            cause=failure.cause,
            log_tail=list(failure.tail),
            log=None if task is None else self._job.log(task),
            secondary=failure.secondary or None,
        )
