"""The hosts of a run: performs what ``host_start`` decides about each of them.

Turns messages about a host as a whole into events of ``host_start``, and what it
reports into events of the lifecycle; messages about tasks are left to the driver.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import islice

from tfcluster.base.light_dataclasses import dataclass
from tfcluster.base.task_id import TaskId
from tfcluster.launcher import host_start
from tfcluster.launcher.agent_connection import (
    HEARTBEAT_S,
    LEASE_S,
    AgentConnection,
    ChannelReader,
    Closed,
    Opened,
    Unopened,
    open_agent,
    open_all,
)
from tfcluster.launcher.brief_contacts import SILENT_SWEEP_S, SWEEP_S, Cleanup
from tfcluster.launcher.host_facts import HostFacts, certain_lead
from tfcluster.launcher.host_liveness import HostLiveness
from tfcluster.launcher.host_start import StartStage
from tfcluster.launcher.job import Item, Job
from tfcluster.launcher.live_run import LiveRun
from tfcluster.launcher.preparation import (
    changed_python,
    prepare_request,
    requirements_digest,
    unprepared_cause,
    warm_requests,
    why_unable,
)
from tfcluster.launcher.workdir_listing import WorkdirSender
from tfcluster.lifecycle.events import Event, HostFailed, HostLost
from tfcluster.plan.model import Host
from tfcluster.protocol import messages, requests
from tfcluster.protocol.frames import ProtocolError
from tfcluster.schedulers.starting import Starter


@dataclass(slots=True)
class _Contact:
    host: Host
    state: host_start.State
    connection: AgentConnection | None = None
    resolved: tuple[str, ...] = ()
    """What the host's name or configured address resolves to here."""


class Hosts:
    """All hosts of a job. Every method is called from the launcher's one loop."""

    def __init__(
        self, run: LiveRun, starter: Starter, post: Callable[[Item], None]
    ) -> None:
        job = run.job
        self._run = run
        self._starter = starter
        self._post = post
        self._contacts = {host.name: self._new(job, host) for host in job.used_hosts()}
        self._pinged_s = time.monotonic()
        self._added: set[str] = set()
        """The hosts that have no task yet, but will have some of the planned job."""
        self._reader = ChannelReader()
        self._events: list[Event] = []
        """What the lifecycle is to be told next."""
        self._dead_guards: dict[str, int] = {}
        """The pids of agents' guard processes that have died."""
        self._failures: list[HostFailed] = []
        """What it is to be told once every host has answered or failed: others may
        fail like this one."""
        self.facts = HostFacts(self._contacts)
        self.files = WorkdirSender(job.files, self.send)
        self.sweeps = Cleanup(starter, job.run)
        self.silence = HostLiveness(starter, post)
        self.clock_leads_s: dict[str, float] = {}
        """How far hosts' clocks are ahead of ours for certain."""

    @property
    def _job(self) -> Job:
        return self._run.job

    def open(self) -> None:
        """Start every agent, FAN_OUT at a time; posts Opened or Unopened for each."""
        self._open([contact.host for contact in self._contacts.values()])

    def _open(self, hosts: Sequence[Host]) -> None:
        open_all(self._starter, hosts, self._open_one, self._post)

    def _open_one(self, host: Host) -> AgentConnection:
        return open_agent(
            self._starter,
            host,
            self._job.run,
            self._job.description.grace_s,
            self._post,
            self._reader,
            witness=str(self._job.witness),
        )

    def prepare_for(self, job: Job) -> list[str]:
        """Prepare for a later job, whose new hosts are started and returned."""
        self._run.current.planned = job
        new = []
        for host in job.used_hosts():
            contact = self._contacts.get(host.name)
            if contact is not None and not host_start.is_gone(contact.state):
                count = _count_ports(job, host)
                self._step(contact, host_start.PortsWanted(count))
                continue
            self._contacts[host.name] = self._new(job, host)
            self._added.add(host.name)
            self.facts.expect(host.name)
            new.append(host)
        self._open(new)
        return [host.name for host in new]

    def is_ready_for(self, job: Job) -> bool:
        """Whether all hosts of the job are ready and hold enough ports."""
        for host in job.used_hosts():
            state = self._state(host)
            if not isinstance(state, host_start.ReadyHost):
                return False
            if len(state.ports) < _count_ports(job, host):
                return False
        return True

    def why_not_ready(self, job: Job) -> str | None:
        """Why a host of the job will never be ready; None if all may become ready."""
        for host in job.used_hosts():
            state = self._state(host)
            if host_start.is_gone(state):
                return f"{host.name} is lost"
            if isinstance(state, host_start.ReadyHost) and state.shortage is not None:
                return f"{host.name}: {state.shortage}"
        return None

    def forget_plan(self) -> list[str]:
        """Drop the planned job; returns the hosts that are no longer needed."""
        self._run.current.planned = self._job
        return [
            name
            for name, contact in self._contacts.items()
            if name in self._added and not host_start.is_gone(contact.state)
        ]

    def adopt_plan(self) -> None:
        """Note that the planned job is now the current one."""
        self._added -= {host.name for host in self._job.used_hosts()}

    def _state(self, host: Host) -> host_start.State:
        contact = self._contacts.get(host.name)
        return host_start.Unreached() if contact is None else contact.state

    def _new(self, job: Job, host: Host) -> _Contact:
        needs = host_start.Needs(
            ports=_count_ports(job, host),
            files=job.files is not None,
            set_up=job.description.prepares_hosts,
        )
        return _Contact(host, host_start.Connecting(needs))

    def _job_of(self, host: Host) -> Job:
        return self._run.current.planned if host.name in self._added else self._job

    def send(self, host: str, request: requests.Request) -> None:
        connection = self._contacts[host].connection
        if connection is not None:
            connection.send(request)

    def ping(self) -> None:
        now_s = time.monotonic()
        if now_s - self._pinged_s < HEARTBEAT_S:
            return
        self._pinged_s = now_s
        clocks = self._job.description.runtime.trace
        for name, contact in self._contacts.items():
            if not host_start.is_gone(contact.state):
                self.send(name, requests.PingRequest())
                if clocks and name in self.facts:
                    self.ask_clock(name)

    def ask_clock(self, name: str) -> None:
        """Ask a host that has answered before for the time of its monotonic clock."""
        self.send(name, requests.ClockRequest(time.time()))

    def close(self, names: Sequence[str], grace_s: float) -> None:
        """Have agents end; ``elapsed`` returns the ends of those that never began."""
        self._failures = [f for f in self._failures if f.host not in names]
        for name in names:
            self._step(self._contacts[name], host_start.EndWanted(grace_s))

    def drop(self, names: Sequence[str]) -> None:
        """End contact, and have new agents sweep what the old ones left."""
        for name in names:
            self._step(self._contacts[name], host_start.GivenUp())

    def finish(self) -> list[str]:
        """Wait for sweeps, end all contacts; returns the hosts not swept."""
        unswept = self.sweeps.wait()
        for contact in self._contacts.values():
            if contact.connection is not None:
                contact.connection.close()
        return unswept

    def _step(self, contact: _Contact, event: host_start.Event) -> None:
        name, state = contact.host.name, contact.state
        contact.state, actions = host_start.step(name, state, event)
        for action in actions:
            self._perform(contact, action)

    def _perform(self, contact: _Contact, action: host_start.Action) -> None:
        name = contact.host.name
        match action:
            case host_start.Begin(stage):
                self._begin(contact, stage)
            case host_start.HoldPorts(count):
                ports = self._job.description.ports
                low, high = (ports.low, ports.high) if ports else (None, None)
                self.send(name, requests.Hold(count, low, high))
            case host_start.EndAgent(grace_s):
                self.send(name, requests.Close(grace_s))
            case host_start.Disconnect(sweep):
                if contact.connection is not None:
                    contact.connection.kill()
                if sweep:
                    is_long = self.silence.is_long(name)
                    patience_s = SILENT_SWEEP_S if is_long else SWEEP_S
                    self.sweeps.begin(contact.host, patience_s)
            case HostFailed():
                self._failures.append(action)
            case _:
                self._events.append(action)

    def _begin(self, contact: _Contact, stage: StartStage) -> None:
        if stage is StartStage.IMPORT:
            host = contact.host
            job, package = self._job_of(host), self.facts.package(host.name)
            warm = warm_requests(job, host, package, self.files.cwd)
            for request in warm:
                self.send(host.name, request)
            if warm:
                self._note_import(host)
            keys = frozenset(request.key for request in warm)
            self._step(contact, host_start.ImportsBegun(keys))
            return
        self._note(contact.host.name, stage)
        if stage is StartStage.COPY:
            self.files.begin(contact.host.name)
        elif stage is StartStage.SET_UP:
            self._set_up(contact.host)

    def _note_import(self, host: Host) -> None:
        self._note(host.name, StartStage.IMPORT)
        phase = "importing tensorflow"
        for spec in self._job.on_host(host):
            if spec.warm:
                task = str(spec.task)
                self._run.journal.event("task", task=task, attempt=0, phase=phase)

    def _note(self, host: str, stage: StartStage, began_s: float | None = None) -> None:
        journal = self._run.journal
        journal.event("stage", host=host, stage=stage.value, began=began_s)

    def _set_up(self, host: Host) -> None:
        """Have the host run the set-up lines, and find or make its environment."""
        description = self._job.description
        request = prepare_request(
            description,
            host,
            cwd=self.files.cwd(host.name, str(description.workdir)),
            log=str(self._job.logs / f"setup-{host.name}.log"),
            digest=self._digest,
        )
        self.send(host.name, request)

    @cached_property
    def _digest(self) -> str | None:
        requirements = self._job.description.requirements
        return None if requirements is None else requirements_digest(requirements)

    def elapsed(self, seconds: float) -> list[Event]:
        """Add to every host's silence; a host that was silent for too long is lost.

        Called with little at a time: we may have been suspended, or be behind.
        """
        for name, contact in self._contacts.items():
            connection, has_greeted = contact.connection, name in self.facts
            if connection is None or not has_greeted:
                continue
            if not host_start.is_heard(contact.state):
                continue
            limit_s = self.silence.elapsed(contact.host, seconds)
            if limit_s is None:
                continue
            silent_s = connection.silent_s()
            if silent_s < limit_s:
                self.silence.heard(name, silent_s)
            else:
                cause = f"{name} silent for {limit_s:g} s"
                # Our frames may still reach it until we end the contact: its lease
                # begins then.
                alive_s = LEASE_S + self._job.description.grace_s
                self._events.append(HostLost(name, cause, harmless_after_s=alive_s))
        return self._take_events()

    def opened(self, item: Opened | Unopened) -> list[Event]:
        """Handle an agent that was started, or could not be."""
        contact = self._contacts[item.host]
        if isinstance(item, Unopened):
            cause = item.error.sentence.removeprefix(f"{item.host}: ")
            if host_start.is_awaited(contact.state):
                self._note(item.host, StartStage.CONNECT, item.began_s)
            self._step(contact, host_start.NotConnected(cause, item.error.exit_code))
            return self._take_events()
        contact.connection, contact.resolved = item.connection, item.resolved
        stages = (StartStage.CONNECT, StartStage.RESOLVE, StartStage.AGENT)
        for stage, at_s in zip(stages, item.begun_s, strict=True):
            if stage is not StartStage.RESOLVE or item.resolved:
                self._note(item.host, stage, at_s)
        self._step(contact, host_start.Connected())
        return self._take_events()

    def closed(self, item: Closed) -> list[Event]:
        """Handle the end of a channel."""
        if guard := self._dead_guards.pop(item.host, None):
            cause = (
                f"the guard process of its agent (pid {guard}) died, and the "
                "connection ended with it; the agent has stopped all tasks there"
            )
            item = Closed(item.host, cause)
        self._step(self._contacts[item.host], item)
        return self._take_events()

    def received(self, host: str, message: messages.Message) -> list[Event] | None:
        """Lifecycle events of a message about the host; None: for the caller."""
        self.silence.heard(host)
        contact = self._contacts[host]
        match message:
            case messages.Ping():
                return []
            case messages.Wants():
                self.files.wants(host, message)
                return []
            case messages.Note(guard=int(pid)):
                self._dead_guards[host] = pid
        event = self._event_of(contact, message)
        if event is None:
            return None
        self._step(contact, event)
        return self._take_events()

    def _event_of(
        self, contact: _Contact, message: messages.Message
    ) -> host_start.Event | None:
        """What a message says about the start or the end of a host; None: nothing."""
        host, description = contact.host.name, self._job.description
        match message:
            case messages.Hello():
                return self._greeted(contact, message)
            case messages.Held(ports):
                if not all(0 < port < 1 << 16 for port in ports):
                    raise ProtocolError("ports must be numbers from 1 to 65535")
                return host_start.PortsHeld(ports, _shortage(message, self._job))
            case messages.Synced():
                self.files.synced(host, message)
                return message
            case messages.Unsynced(cause):
                return host_start.Unable(f"cannot copy the workdir: {cause}")
            case messages.Prepared():
                python = changed_python(description, contact.host, message)
                if python is not None:
                    self._run.current.set_python(host, python)
                return message
            case messages.Unprepared():
                cause = unprepared_cause(description, message)
                return host_start.Unable(cause, message.tail)
            case messages.Cold():
                unable = why_unable(self._job_of(contact.host), contact.host, message)
                return host_start.NotImported(message.key, unable)
            case messages.Fault(cause):
                return host_start.Unable(cause)
            case messages.Making() | messages.Warmed() | messages.Bye():
                return message
        return None

    def _greeted(self, contact: _Contact, hello: messages.Hello) -> host_start.Greeted:
        name = contact.host.name
        if contact.connection is not None:
            asked_s = contact.connection.began_s
            self.clock_leads_s[name] = certain_lead(hello.clock, asked_s, time.time())
        problem = self.facts.note(
            contact.host, hello, contact.resolved, alone=self._is_alone
        )
        return host_start.Greeted(problem)

    def _take_events(self) -> list[Event]:
        states = [contact.state for contact in self._contacts.values()]
        if self._failures and not any(map(host_start.is_awaited, states)):
            self._events += self._failures
            self._failures = []
        events, self._events = self._events, []
        return events

    @property
    def _is_alone(self) -> bool:
        return len(self._contacts) == 1

    def located(self, hosts: Sequence[Host]) -> dict[str, Host]:
        """The hosts, by name, with what their agents have said about them."""
        return self.facts.located(hosts, alone=self._is_alone)

    def peers(self) -> tuple[str, ...]:
        return self.facts.peers(alone=self._is_alone)

    def ports(self) -> dict[TaskId, int]:
        """The port of each task that has one, held by its host's agent."""
        return {task: held[0] for task, held in self._held().items()}

    def parameter_ports(self) -> dict[TaskId, int]:
        return {task: held[1] for task, held in self._held().items() if held[1:]}

    def _held(self) -> dict[TaskId, list[int]]:
        by_task = {}
        for contact in self._contacts.values():
            rest = iter(host_start.ports_of(contact.state))
            for spec in self._job.on_host(contact.host):
                if ports := list(islice(rest, spec.ports)):
                    by_task[spec.task] = ports
        return by_task

    def is_warm(self, host: str, key: str | None) -> bool:
        return key in host_start.warm_of(self._contacts[host].state)


def _count_ports(job: Job, host: Host) -> int:
    return sum(spec.ports for spec in job.on_host(host))


def _shortage(held: messages.Held, job: Job) -> str:
    cause = held.cause or "too few ports are free"
    if job.description.ports is None:
        return cause
    return f"{cause} (stop what uses them, or set 'ports' to another range or auto)"
