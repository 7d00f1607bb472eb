"""The commands ``doctor`` and ``setup``, which prepare hosts and start no task."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tfcluster import schedulers
from tfcluster.base.errors import ConfigError, ExitCode, Problem
from tfcluster.commands.launch import load_file, submits_to
from tfcluster.console.display import DEFAULT, Display, style_of
from tfcluster.console.output import put, say
from tfcluster.console.sanitise import sanitise, sanitise_word
from tfcluster.console.text import table
from tfcluster.doctor.diagnosis import (
    HEADER,
    Finding,
    fact_lines,
    findings,
    rows,
    to_json,
)
from tfcluster.doctor.probe_hosts import HostAnswers, ProbedRequirements, examine
from tfcluster.launcher.launch import PreparedLaunch, prepare
from tfcluster.launcher.preparation import (
    changed_python,
    prepare_request,
    requirements_digest,
    unprepared_cause,
)
from tfcluster.plan.model import Description, Host
from tfcluster.protocol.requests import Prepare
from tfcluster.schedulers.base import BatchScheduler
from tfcluster.schedulers.process_channel import OwnHostStarter
from tfcluster.schedulers.starting import Starter


@dataclass(frozen=True, slots=True)
class _Reachable:
    prepared: PreparedLaunch
    hosts: Sequence[Host]
    starter: Starter
    outside_of: BatchScheduler | None = None
    """The scheduler whose job we are not in: the only host is this one, from where the
    job would be submitted. Its nodes may have other interpreters and disks, but most
    likely the same files."""

    def examine(self, *, imports: bool, probes: bool = True) -> dict[str, HostAnswers]:
        description = self.prepared.description
        ports = description.ports
        requirements = ProbedRequirements(
            python=description.python,
            workdir=None if description.sync else str(description.workdir),
            scripts=_scripts(self.prepared),
            imports=imports,
            low=ports.low if ports else None,
            high=ports.high if ports else None,
            prepare=_preparing(description),
            probes=probes,
            unprepared=partial(unprepared_cause, description),
            own_python=partial(changed_python, description),
            say=lambda text: say(sanitise(text)),
        )
        return examine(self.hosts, self.starter, requirements)


def _reachable(description: Description, environ: Mapping[str, str]) -> _Reachable:
    if queue := submits_to(description, environ):
        prepared = prepare(description, queue.expected(description))
        here = Host(name=os.uname().nodename, address="127.0.0.1")
        return _Reachable(prepared, (here,), OwnHostStarter(), queue)
    scheduler = schedulers.get(description.backend)
    prepared = prepare(description, scheduler.allocate(description, environ))
    starter = scheduler.starter(description, environ)
    return _Reachable(prepared, prepared.allocation.hosts, starter)


def doctor(
    path: str,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    display: Display = DEFAULT,
    *,
    as_json: bool,
    quick: bool,
    passed: Sequence[str] = (),
) -> int:
    """Examine a file's hosts; returns the exit code with which a launch would fail."""
    description = load_file(path, environ, overrides=overrides, passed=passed)
    reachable = _reachable(description, environ)
    reports = reachable.examine(imports=not quick)
    scheduler = reachable.outside_of
    if scheduler is None:
        groups, gpus = reachable.prepared.description.tasks, Counter[str]()
        for spec in reachable.prepared.specs:
            gpus[spec.place.host.name] += groups[spec.task.type].gpus or 0
        problems = findings(reports, gpus, description.remedy)
    else:
        problems = [
            problem
            if problem.text.startswith("there is no ")
            else replace(problem, error=False)
            for problem in findings(reports, {}, description.remedy)
        ]
        program = scheduler.submit_command
        if shutil.which(program, path=environ.get("PATH")) is None:
            text = (
                f"there is no {program} on the PATH (load {scheduler.title}'s module)"
            )
            problems.append(Finding(reachable.hosts[0].name, text))
    if as_json:
        put(json.dumps(to_json(reports, problems), indent=1) + "\n")
    else:
        _show(reports, problems, environ, display)
    if scheduler is not None and not display.quiet:
        say(
            f"not inside a job of {scheduler.title}: its nodes can be checked only "
            "from inside one; only this host was checked"
        )
    return _exit_code(
        unreachable=any(problem.unreachable for problem in problems),
        failed=any(problem.error for problem in problems),
    )


def _preparing(description: Description) -> Callable[[Host], Prepare] | None:
    if not description.prepares_hosts:
        return None
    # A folder that has not been copied yet does not exist on the hosts.
    cwd = "/" if description.sync else str(description.workdir)
    requirements = description.requirements
    digest = None if requirements is None else requirements_digest(requirements)
    null = "/dev/null"
    return partial(prepare_request, description, cwd=cwd, log=null, digest=digest)


def _scripts(prepared: PreparedLaunch) -> tuple[str, ...]:
    programs = {spec.arguments[1] for spec in prepared.specs if len(spec.arguments) > 1}
    return tuple(sorted(p for p in programs if p not in ("-m", "-c")))


def _show(
    reports: Mapping[str, HostAnswers],
    problems: Sequence[Finding],
    environ: Mapping[str, str],
    display: Display,
) -> None:
    if not display.quiet:
        examined = {name: report for name, report in reports.items() if report.facts}
        _put_table(rows(examined), HEADER)
        if display.everything:
            for name, report in examined.items():
                put(f"\n{sanitise_word(name)}\n")
                put("".join(f"  {sanitise(line)}\n" for line in fact_lines(report)))
    style = style_of(sys.stderr, environ, colours=display.colours)
    for problem in problems:
        paint = style.red if problem.error else style.yellow
        say(paint(sanitise(str(problem))))
    if not problems and not display.quiet:
        say(style.green("no problems found"))


def _put_table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> None:
    cells = [[sanitise_word(cell) for cell in row] for row in rows]
    put("".join(f"{line}\n" for line in table(cells, header)))


def _exit_code(*, unreachable: bool, failed: bool) -> int:
    if unreachable:
        return ExitCode.HOST
    return ExitCode.START if failed else ExitCode.OK


def setup(
    path: str,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    *,
    passed: Sequence[str] = (),
) -> int:
    """Run the setup lines and make the environment on every host; print its Python."""
    description = load_file(path, environ, overrides=overrides, passed=passed)
    if not description.prepares_hosts:
        message = "there is nothing to set up"
        hint = "'requirements' or 'setup' says what hosts need"
        raise ConfigError([Problem(description.source, message, hint)])
    _refuse_files_to_copy(description)
    reachable = _reachable(description, environ)
    reports = reachable.examine(imports=False, probes=False)
    if scheduler := reachable.outside_of:
        say(
            f"not inside a job of {scheduler.title}: only this host was set up, which "
            "suffices if its nodes share your home folder"
        )
    pythons = {
        name: report.host.task_python or description.python
        for name, report in reports.items()
        if report.error is None
    }
    python_rows = [(name, shlex.join(python)) for name, python in pythons.items()]
    _put_table(python_rows, ("host", "python"))
    failed = [report for report in reports.values() if report.error is not None]
    for report in failed:
        say(sanitise(f"{report.host.name}: error: {report.error}"))
    return _exit_code(
        unreachable=any(report.unreachable for report in failed), failed=bool(failed)
    )


def _refuse_files_to_copy(description: Description) -> None:
    requirements, workdir = description.requirements, description.workdir
    if requirements is None or description.sync is None:
        return
    for local in (*requirements.local, *requirements.editable):
        if local.is_relative_to(workdir):
            message = (
                f"{requirements.file} refers to {local}, which only a launch copies "
                "to the hosts"
            )
            hint = "`tfcluster launch` makes the environment, too"
            raise ConfigError([Problem(description.source, message, hint)])
