"""The agents of a run: starts them, prepares them, and detects their loss.

Turns messages about a host as a whole into lifecycle events; messages about tasks are
left to the driver.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import islice

from tfcluster.compose import WARM, warm_specs
from tfcluster.errors import ExitCode, StartError, TfclusterError
from tfcluster.isolated_import import PACKAGE_ROOT, module_argv
from tfcluster.launcher.agent_connection import (
    LEASE_S,
    Closed,
    Opened,
    Unopened,
    open_agent,
)
from tfcluster.launcher.channel_threads import ChannelThreads
from tfcluster.launcher.cleanup import SILENT_SWEEP_S, SWEEP_S, Cleanup
from tfcluster.launcher.clocks import certain_lead
from tfcluster.launcher.current_job import CurrentJob
from tfcluster.launcher.fan_out import open_all
from tfcluster.launcher.host_address import choose_address, is_address, resolve
from tfcluster.launcher.host_liveness import HostLiveness
from tfcluster.launcher.host_side import HostSide, machine_of
from tfcluster.launcher.host_stages import (
    AGENT,
    CONNECT,
    COPY,
    ENVIRONMENT,
    IMPORT,
    PREPARE,
    RESOLVE,
    NoteStage,
    not_noted,
)
from tfcluster.launcher.job import Item, Job, search_paths, warm_env
from tfcluster.launcher.preparation import changed_python, prepare_request, unprepared
from tfcluster.launcher.workdir_sender import WorkdirSender
from tfcluster.lifecycle.types import Event, HostClosed, HostFailed, HostLost, HostReady
from tfcluster.model import Host, Strategy
from tfcluster.peer_filter import compact
from tfcluster.protocol import messages, requests
from tfcluster.protocol.frames import ProtocolError
from tfcluster.protocol.wire import UNFORKABLE, UNUSABLE
from tfcluster.schedulers.starting import Starter
from tfcluster.task_id import TaskId


class Hosts:
    """All hosts of a job. Every method is called from the launcher's one loop."""

    def __init__(
        self,
        current: CurrentJob,
        starter: Starter,
        post: Callable[[Item], None],
        note: NoteStage = not_noted,
    ) -> None:
        job = current.job
        self._current = current
        self._note = note
        self._starter = starter
        self._post = post
        self._sides = {host.name: HostSide(host) for host in job.used_hosts()}
        self._threads = ChannelThreads()
        self._failed: list[HostFailed] = []
        self.files = WorkdirSender(job.files, self.send)
        self.sweeps = Cleanup(starter, job.run)
        self.silence = HostLiveness(starter, post)
        self.clock_leads_s: dict[str, float] = {}
        """How far hosts' clocks are ahead of ours for certain."""

    @property
    def _job(self) -> Job:
        return self._current.job

    # --- out ------------------------------------------------------------------------

    def open(self) -> None:
        """Start every agent, FAN_OUT at a time; posts Opened or Unopened for each."""
        self._open([side.host for side in self._sides.values()])

    def _open(self, hosts: Sequence[Host]) -> None:
        open_all(self._starter, hosts, self._open_one)

    def _open_one(self, host: Host) -> None:
        began_s = self._sides[host.name].connecting_s = time.time()
        try:
            contact = open_agent(
                self._starter,
                host,
                self._job.run,
                self._job.description.grace_s,
                self._post,
                self._threads,
                witness=str(self._job.witness),
            )
        except TfclusterError as error:
            self._post(Unopened(host.name, error))
        else:
            connected_s = time.time()
            given = host.address
            known = given is not None and is_address(given)
            resolved = () if known else resolve(given or host.name)
            begun_s = began_s, connected_s, time.time()
            self._post(Opened(host.name, contact, resolved, begun_s))

    def plan(self, job: Job) -> list[str]:
        """Prepare for a job on more hosts or with other tasks; ``use`` follows later.

        Starts agents on the job's new hosts, and returns these hosts: they are prepared
        while the tasks of the current job run. Other hosts hold more ports if needed.
        """
        self._current.planned = job
        new = []
        for host in job.used_hosts():
            side = self._sides.get(host.name)
            if side is None or side.gone:
                self._sides[host.name] = HostSide(host, added=True)
                new.append(host)
                continue
            side.short = None
            missing = self._ports_for(job, side) - len(side.ports or ())
            if missing > 0 and side.ports is not None:
                self._hold(side, missing)
        self._open(new)
        return [host.name for host in new]

    def is_ready_for(self, job: Job) -> bool:
        """Whether all hosts of the job are ready and hold enough ports."""
        return all(
            side is not None
            and side.ready
            and not side.gone
            and len(side.ports or ()) >= self._ports_for(job, side)
            for side in (self._sides.get(host.name) for host in job.used_hosts())
        )

    def why_not_ready(self, job: Job) -> str | None:
        """Why a host of the job will never be ready; None if all may become ready."""
        for host in job.used_hosts():
            side = self._sides.get(host.name)
            if side is None or side.gone:
                return f"{host.name} is lost"
            if side.short is not None:
                return f"{host.name}: {side.short}"
        return None

    def forget_plan(self) -> list[str]:
        """Drop the planned job; returns the hosts that are no longer needed."""
        self._current.planned = self._job
        return [
            name for name, side in self._sides.items() if side.added and not side.gone
        ]

    def _ports_for(self, job: Job, side: HostSide) -> int:
        return sum(spec.ports for spec in job.on_host(side.host))

    def _job_of(self, side: HostSide) -> Job:
        """The job for whose tasks the host is prepared."""
        return self._current.planned if side.added else self._job

    def _ports_of(self, side: HostSide) -> int:
        """How many ports the tasks of a host need."""
        return self._ports_for(self._job_of(side), side)

    def _hold(self, side: HostSide, count: int) -> None:
        ports = self._job.description.ports
        low, high = (ports.low, ports.high) if ports else (None, None)
        self.send(side.host.name, requests.Hold(count, low, high))

    def _prepare(self, side: HostSide) -> None:
        """Have the host run the setup lines, if there are any, and import."""
        description, name = self._job.description, side.host.name
        if not description.prepares_hosts:
            self._warm(side)
            return
        side.preparing = True
        self._note(name, PREPARE, None)
        cwd = self.files.cwd(name, str(description.workdir))
        log = str(self._job.logs / f"setup-{name}.log")
        digest = self._digest
        request = prepare_request(
            description, side.host, cwd=cwd, log=log, digest=digest
        )
        self.send(name, request)

    @cached_property
    def _digest(self) -> str | None:
        """An identifier of the requirements; None if there are none."""
        requirements = self._job.description.requirements
        if requirements is None:
            return None
        # Imported here: few launches need it.

        from tfcluster.launcher.requirements_digest import requirements_digest

        return requirements_digest(requirements)

    def _warm(self, side: HostSide) -> None:
        job, package = self._job_of(side), self.package(side.host.name)
        specs = job.on_host(side.host)
        by_key = {spec.warm: spec for spec in specs}
        if warm_specs(specs):
            self._note(side.host.name, IMPORT, None)
        for number, warm in enumerate(warm_specs(specs)):
            side.warm.add(warm.key)
            side.warming.add(warm.key)
            request = requests.Warm(
                key=warm.key,
                argv=tuple(module_argv(warm.python, WARM, root=package)),
                env=warm_env(job, by_key[warm.key]),
                cwd=self.files.cwd(side.host.name, warm.cwd),
                log=str(self._job.logs / f"warm-{side.host.name}-{number}.log"),
                wrapped=len(warm.python) > 1,
                prepend=search_paths(job, package),
            )
            self.send(side.host.name, request)

    def send(self, host: str, request: requests.Request) -> None:
        """Queue a request for a host; does nothing if we have no contact with it."""
        contact = self._sides[host].contact
        if contact is not None:
            contact.send(request)

    def ping(self) -> None:
        clocks = self._job.description.runtime.trace
        for name, side in self._sides.items():
            if not side.gone:
                self.send(name, requests.Ping())
                if clocks and side.hello:
                    self.ask_clock(name)

    def ask_clock(self, name: str) -> None:
        """Ask a host that has answered before for the time of its monotonic clock."""
        self.send(name, requests.Clock(time.time()))

    def close(self, names: Sequence[str], grace_s: float) -> None:
        for name in names:
            side = self._sides[name]
            side.closing = True
            if side.contact is None:
                # Connecting may take long, and the agent is no longer needed.
                self._post(Unopened(name, StartError(f"{name}: no longer needed")))
            else:
                self.send(name, requests.Close(grace_s))

    def drop(self, names: Sequence[str]) -> None:
        """End contact, and have new agents sweep what the old ones left."""
        for name in names:
            side = self._sides[name]
            side.gone = True
            if side.contact is not None:
                side.contact.kill()
            elif side.added:
                continue  # nothing was started there
            silent = self.silence.is_long(name)
            self.sweeps.begin(side.host, SILENT_SWEEP_S if silent else SWEEP_S)

    def finish(self) -> list[str]:
        """Wait for running sweeps and end all contacts.

        Returns the lost hosts that could not be swept.
        """
        unswept = self.sweeps.wait()
        for side in self._sides.values():
            if side.contact is not None:
                side.contact.close()
        return unswept

    # --- in -------------------------------------------------------------------------

    def elapsed(self, seconds: float) -> list[Event]:
        """Add to every host's silence; a host that was silent for too long is lost.

        The caller adds little at a time, so that a launcher that was itself suspended
        does not blame its hosts. What has arrived here counts, even if the launcher has
        not handled it yet because too many lines arrive.
        """
        events: list[Event] = []
        for name, side in self._sides.items():
            if side.gone or side.contact is None or not side.hello:
                continue
            limit_s = self.silence.elapsed(side.host, seconds)
            if limit_s is None:
                continue
            silent_s = side.contact.silent_s()
            if silent_s < limit_s:
                self.silence.heard(name, silent_s)
            else:
                cause = f"{name} silent for {limit_s:g} s"
                # Our frames may still reach it until we end the contact: its lease
                # begins then.
                alive_s = LEASE_S + self._job.description.grace_s
                events.append(HostLost(name, cause, harmless_after_s=alive_s))
        return events

    def opened(self, item: Opened | Unopened) -> list[Event]:
        """Handle an agent that was started, or could not be."""
        side = self._sides[item.host]
        if isinstance(item, Unopened):
            if side.gone or side.contact is not None:
                return []
            side.gone = True
            if side.connecting_s is not None:
                self._note(item.host, CONNECT, side.connecting_s)
            if side.closing:
                return [HostClosed(item.host)]
            error = item.error
            hint = f" ({error.hint})" if error.hint else ""
            cause = error.message.removeprefix(f"{item.host}: ") + hint
            return self._fail(item.host, cause, error.exit_code)
        side.contact, side.resolved = item.contact, item.resolved
        for stage, at_s in zip((CONNECT, RESOLVE, AGENT), item.begun_s, strict=True):
            if stage != RESOLVE or item.resolved:
                self._note(item.host, stage, at_s)
        if side.gone:
            item.contact.kill()
        elif side.closing:
            self.send(item.host, requests.Close(0.0))
        else:
            self._hold(side, self._ports_of(side))
        return []

    def _fail(
        self,
        host: str,
        cause: str,
        code: ExitCode = ExitCode.START,
        tail: tuple[str, ...] = (),
    ) -> list[Event]:
        """Note a host that cannot be prepared; such hosts are reported together."""
        if self._sides[host].failed:
            return []
        self._sides[host].failed = True
        self._failed.append(HostFailed(host, cause, code, tail))
        return self._failures()

    def _failures(self) -> list[Event]:
        """The failed hosts, once every host has answered or failed."""
        if any(not side.hello and not side.gone for side in self._sides.values()):
            return []
        failed, self._failed = self._failed, []
        return list(failed)

    def closed(self, item: Closed) -> list[Event]:
        """Handle the end of a channel."""
        side = self._sides[item.host]
        if side.gone:
            return []
        side.gone = True
        if not side.ready and not side.closing:
            return self._fail(item.host, item.cause)
        cause = item.cause
        if side.dead_guard is not None:
            cause = (
                f"the guard process of its agent (pid {side.dead_guard}) died, and the "
                "connection ended with it; the agent has stopped all tasks there"
            )
        return [HostLost(item.host, f"contact lost: {cause}")]

    def received(self, host: str, message: messages.Message) -> list[Event] | None:
        """Lifecycle events of a message about the host; None if it is for the caller.

        Raises ProtocolError.
        """
        side = self._sides[host]
        self.silence.heard(host)
        match message:
            case messages.Ping():
                return []
            case messages.Hello():
                return self._greeted(side, message)
            case messages.Held(ports):
                if not all(0 < port < 1 << 16 for port in ports):
                    raise ProtocolError("ports must be numbers from 1 to 65535")
                if side.ready:
                    side.ports = [*(side.ports or ()), *ports]
                    if len(side.ports) < self._ports_for(self._current.planned, side):
                        side.short = _too_few_ports(message, self._job)
                    return []
                if len(ports) < self._ports_of(side):
                    return self._fail(host, _too_few_ports(message, self._job))
                side.ports = list(ports)
            case messages.Warmed(key):
                side.warming.discard(key)
            case messages.Cold():
                return self._cold(side, message)
            case messages.Wants():
                self.files.wants(host, message)
            case messages.Synced():
                self.files.synced(host, message)
                self._prepare(side)
            case messages.Making(text):
                if text and not side.making:
                    side.making = True
                    self._note(host, ENVIRONMENT, None)
                return []
            case messages.Prepared():
                self._prepared(side, message)
            case messages.Unprepared():
                return [unprepared(self._job.description, host, message)]
            case messages.Unsynced(cause):
                return [HostFailed(host, f"cannot copy the workdir: {cause}")]
            case messages.Fault(cause):
                return [] if side.ready else [HostFailed(host, cause)]
            case messages.Bye():
                side.gone = True
                return [HostClosed(host)]
            case messages.Note(guard=int(pid)):
                side.dead_guard = pid
                return None  # the note is shown like any other
            case _:
                return None
        return self._ready(side)

    def _greeted(self, side: HostSide, hello: messages.Hello) -> list[Event]:
        side.hello, name = hello, side.host.name
        if side.contact is not None:
            asked_s = side.contact.began_s
            self.clock_leads_s[name] = certain_lead(hello.clock, asked_s, time.time())
        side.reachable, side.address = (
            choose_address(
                side.host,
                way_in=hello.way_in,
                local=hello.addresses,
                resolved=side.resolved,
                alone=alone,
            )
            for alone in (False, len(self._sides) == 1)
        )
        if not side.address:
            cause = "it has no address at which the other hosts can reach it"
            return self._fail(name, f"{cause} (give it an 'address' under 'hosts')")
        self.files.begin(name)
        if self.files.busy(name):
            self._note(name, COPY, None)
        else:
            self._prepare(side)
        return [*self._failures(), *self._ready(side)]

    def _prepared(self, side: HostSide, prepared: messages.Prepared) -> None:
        side.preparing = False
        python = changed_python(self._job.description, side.host, prepared)
        if python is not None:
            self._current.set_python(side.host.name, python)
        self._warm(side)

    def _cold(self, side: HostSide, cold: messages.Cold) -> list[Event]:
        side.warming.discard(cold.key)
        side.warm.discard(cold.key)
        strategy = self._job.description.runtime.strategy
        if side.ready or strategy is Strategy.NONE or cold.wrapper == UNFORKABLE:
            return self._ready(side)
        tail = cold.tail
        specs = self._job_of(side).on_host(side.host)
        pythons = {spec.python for spec in specs if spec.warm == cold.key}
        which = next((f"{shlex.join(python)} " for python in pythons if python), "")
        what = "has" if cold.unfit else "cannot import TensorFlow:"
        cause = (
            f"{which or 'Python '}{what} {cold.cause} ({self._job.description.remedy})"
        )
        if cold.wrapper == UNUSABLE and tail:
            cause, tail = tail[-1].removeprefix("tfcluster: "), ()
        return [HostFailed(side.host.name, cause, ExitCode.START, tail)]

    def _ready(self, side: HostSide) -> list[Event]:
        waiting = not side.hello or side.preparing or bool(side.warming)
        waiting = waiting or self.files.busy(side.host.name)
        if side.ready or waiting or side.ports is None:
            return []
        side.ready = True
        return [HostReady(side.host.name)]

    def use(self) -> None:
        """Note that the planned job is now the current one."""
        for host in self._job.used_hosts():
            self._sides[host.name].added = False

    # --- questions ------------------------------------------------------------------

    def addresses(self) -> dict[str, str]:
        """The address at which other hosts reach each host."""
        if len(self._sides) == 1:
            return {name: side.address for name, side in self._sides.items()}
        return {
            name: side.reachable or side.address for name, side in self._sides.items()
        }

    def peers(self) -> tuple[str, ...]:
        """The networks that the hosts of the run are in, as in ``peer_filter``."""
        found = [a for hello in self._hellos().values() for a in hello.addresses]
        for side in self._sides.values():
            found += (*side.resolved, side.address, side.reachable)
        return compact(found)

    def cpus(self) -> dict[str, int]:
        """Host -> the number of its cores, if known."""
        return {name: hello.cpus for name, hello in self._hellos().items()}

    def gpus(self) -> dict[str, tuple[str, ...]]:
        """The GPUs that each host reports."""
        return {name: hello.gpus for name, hello in self._hellos().items()}

    def machines(self) -> dict[str, str]:
        """Host names that share a machine -> the first name of that machine."""
        names: dict[tuple[str, ...], list[str]] = {}
        for name, hello in self._hellos().items():
            if machine := machine_of(hello):
                names.setdefault(machine, []).append(name)
        return {name: same[0] for same in names.values() if same[1:] for name in same}

    def _hellos(self) -> dict[str, messages.Hello]:
        """What the agents have said that have said something."""
        return {name: side.hello for name, side in self._sides.items() if side.hello}

    def shares_files(self, host: str) -> bool:
        """Whether logs that are written on a host are visible here."""
        hello = self._sides[host].hello
        return hello is None or hello.shared is not False

    def package(self, host: str) -> str:
        """The folder on a host that holds this package."""
        hello = self._sides[host].hello
        return PACKAGE_ROOT if hello is None else hello.package

    def ports(self) -> dict[TaskId, int]:
        """The port of each task that has one, held by its host's agent."""
        return {task: held[0] for task, held in self._held().items()}

    def parameter_ports(self) -> dict[TaskId, int]:
        """The second port of each ps that has one."""
        return {task: held[1] for task, held in self._held().items() if held[1:]}

    def _held(self) -> dict[TaskId, list[int]]:
        found = {}
        for side in self._sides.values():
            rest = iter(side.ports or ())
            for spec in self._job.on_host(side.host):
                if ports := list(islice(rest, spec.ports)):
                    found[spec.task] = ports
        return found

    def importing(self, host: str) -> bool:
        """Whether one of the host's warm interpreters is not ready yet."""
        return bool(self._sides[host].warming)

    def is_warm(self, host: str, key: str | None) -> bool:
        return key in self._sides[host].warm


def _too_few_ports(held: messages.Held, job: Job) -> str:
    """The agent's reason, with what the user can do."""
    cause = held.cause or "too few ports are free"
    if job.description.ports is None:
        return cause
    return f"{cause} (stop what uses them, or set 'ports' to another range or auto)"
