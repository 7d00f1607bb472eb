"""Probes all hosts in parallel, each through an agent, with common deadlines."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfcluster.base.errors import ExitCode
from tfcluster.base.isolated_import import module_argv
from tfcluster.base.light_dataclasses import replace
from tfcluster.doctor.probe import MARK
from tfcluster.launcher.agent_connection import Closed, Received, Unopened
from tfcluster.launcher.brief_contacts import BriefContacts, Item, greeting_s
from tfcluster.launcher.host_facts import certain_lead, choose_address, resolve
from tfcluster.plan.model import Host, Interpreter
from tfcluster.protocol import messages, requests
from tfcluster.protocol.wire import loads
from tfcluster.schedulers.starting import Starter

PROBING_S = 90.0
PREPARING_S = 300.0

FEW = 16
"""With up to this many hosts, each one tries to reach all others."""

_PROBE = "tfcluster.doctor.probe"
_TASK = "doctor"


@dataclass(frozen=True, slots=True)
class ProbedRequirements:
    python: Interpreter
    workdir: str | None
    """The working directory; None: it will be copied to the hosts."""
    scripts: tuple[str, ...]
    imports: bool
    low: int | None = None
    high: int | None = None
    prepare: Callable[[Host], requests.Prepare] | None = None
    """The request that prepares a host; None: nothing has to be done."""
    probes: bool = True
    """Whether hosts are examined once they are prepared."""
    unprepared: Callable[[messages.Unprepared], str] = lambda answer: answer.cause
    """Why a host could not be prepared, from its answer."""
    own_python: Callable[[Host, messages.Prepared], Interpreter | None] = lambda *_: (
        None
    )
    """The interpreter that a host has after its preparation."""
    say: Callable[[str], None] = lambda text: None
    """Called with a message about what a host does that takes long."""


@dataclass(slots=True)
class HostAnswers:
    host: Host
    error: str | None = None
    """Why there are no facts about it."""
    unreachable: bool = False
    """Whether the error is that the host cannot be reached or is not trusted."""
    address: str = ""
    port: int | None = None
    prepared: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    clock_error_s: float | None = None
    """How far its clock is ahead of ours for certain."""

    @property
    def known_facts(self) -> dict[str, Any]:
        """The facts without the mark that no more follow."""
        return {name: fact for name, fact in self.facts.items() if name != "ended"}


def examine(
    hosts: Sequence[Host], starter: Starter, requirements: ProbedRequirements
) -> dict[str, HostAnswers]:
    return _Examination(hosts, starter, requirements).run()


def peers_to_probe(number: int, count: int) -> list[int]:
    """Which of ``count`` hosts in a ring host ``number`` tries to reach.

    With many hosts, those at the distances 1, 2, 4, ... after it. Each host is tried by
    as many hosts as it tries, near and far. Neither hosts nor the kernel's ARP table
    (1024 entries by default) get a burst of connections that no launch would make.
    """
    if count <= FEW:
        return [other for other in range(count) if other != number]
    steps = [1 << bit for bit in range(count.bit_length()) if 1 << bit <= count // 2]
    return sorted({(number + step) % count for step in steps})


class _Examination:
    def __init__(
        self, hosts: Sequence[Host], starter: Starter, requirements: ProbedRequirements
    ) -> None:
        self._requirements = requirements
        self._reports = {host.name: HostAnswers(host) for host in hosts}
        self._contacts = BriefContacts(starter, "doctor")
        self._asked_s: dict[str, float] = {}
        self._packages: dict[str, str] = {}
        self._alone = len(hosts) == 1
        self._deadline = 0.0

    def run(self) -> dict[str, HostAnswers]:
        try:
            self._contacts.open([report.host for report in self._reports.values()])
            patience_s = greeting_s(len(self._reports))
            self._until(lambda r: r.port is not None, patience_s, "no answer")
            if self._requirements.prepare is not None:
                for report in self._well():
                    request = self._requirements.prepare(report.host)
                    self._contacts.send(report.host.name, request)
                complaint = "the preparation has not ended"
                self._until(lambda r: r.prepared, PREPARING_S, complaint)
            if not self._requirements.probes:
                return self._reports
            ring = [report for report in self._well() if report.address]
            tried = {
                report.host.name: [ring[n] for n in peers_to_probe(number, len(ring))]
                for number, report in enumerate(ring)
            }
            for report in self._well():
                self._probe(report, tried.get(report.host.name, []))
            self._until(
                lambda r: "ended" in r.facts, PROBING_S, "no answer to the probe"
            )
        finally:
            self._contacts.close()
        return self._reports

    def _well(self) -> list[HostAnswers]:
        return [report for report in self._reports.values() if report.error is None]

    def _until(self, done: Any, patience_s: float, complaint: str) -> None:
        self._deadline = time.monotonic() + patience_s
        while missing := [r for r in self._well() if not done(r)]:
            item = self._contacts.next(self._deadline - time.monotonic())
            if item is not None:
                self._handle(item)
            elif time.monotonic() >= self._deadline:
                for report in missing:
                    report.error = f"{complaint} in {patience_s:g} s"
                return

    def _handle(self, item: Item) -> None:
        if isinstance(item, Received):
            self._received(self._reports[item.host], item.message)
        elif isinstance(item, Closed):
            report = self._reports[item.host]
            report.error = report.error or item.cause
        elif isinstance(item, Unopened):
            report, error = self._reports[item.host], item.error
            hint = f" ({error.hint})" if error.hint else ""
            report.error = error.message.removeprefix(f"{item.host}: ") + hint
            report.unreachable = error.exit_code is ExitCode.HOST
        else:
            hold = requests.Hold(1, self._requirements.low, self._requirements.high)
            self._contacts.send(item.host, hold)

    def _received(self, report: HostAnswers, message: messages.Message) -> None:
        match message:
            case messages.Hello():
                self._packages[report.host.name] = message.package
                report.address = choose_address(
                    report.host,
                    way_in=message.way_in,
                    local=message.addresses,
                    resolved=resolve(report.host.own_name),
                    alone=self._alone,
                )
            case messages.Held((port, *_)):
                report.port = port
            case messages.Held(cause=cause):
                report.error = cause or "no port is free"
            case messages.Making(text):
                # While pip runs, this may take any time.
                self._deadline = time.monotonic() + PREPARING_S
                if text:
                    self._requirements.say(f"{report.host.name}: {text}")
            case messages.Prepared():
                report.prepared = True
                own = self._requirements.own_python
                python = own(report.host, message)
                report.host = replace(report.host, prepared_python=python)
            case messages.Unprepared(tail=tail):
                cause = self._requirements.unprepared(message)
                report.error = "\n    ".join([cause, *tail])
            case messages.Log(lines=lines):
                for line in lines:
                    self._fact(report, line)
            case messages.Failed(cause=cause):
                report.error = cause
            case messages.Exited(code=code, tail=tail):
                report.facts["ended"] = code
                if code:
                    report.error = tail[-1] if tail else "the probe failed"

    def _fact(self, report: HostAnswers, line: str) -> None:
        if not line.startswith(MARK):
            return
        try:
            name, value = loads(line[len(MARK) :].encode())
        except (TypeError, ValueError):
            return  # not from our probe
        if not isinstance(name, str):
            return
        report.facts[name] = value
        if name == "clock" and isinstance(value, int | float):
            asked_s = self._asked_s[report.host.name]
            report.clock_error_s = certain_lead(value, asked_s, time.time())

    def _probe(self, report: HostAnswers, tried: Sequence[HostAnswers]) -> None:
        requirements, name = self._requirements, report.host.name
        peers = [(other.host.name, other.address, other.port) for other in tried]
        request: Mapping[str, Any] = {
            "peers": peers,
            "workdir": requirements.workdir,
            "scripts": requirements.scripts,
            "imports": requirements.imports,
        }
        python = report.host.task_python or requirements.python
        argv = module_argv(
            python, _PROBE, json.dumps(request), root=self._packages[name]
        )
        self._asked_s[name] = time.time()
        start = requests.Start(
            task=_TASK,
            attempt=0,
            argv=tuple(argv),
            env={"PYTHONUNBUFFERED": "1"},
            cwd="/",
            log="/dev/null",
            port=None,
            warm=None,
            parameter_port=None,
            listens=False,
            watched=False,
            peers=None,
            prepend={},
        )
        self._contacts.send(name, start)
