"""The commands ``doctor`` and ``setup``, which prepare hosts and start no task."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from tfcluster import config, schedulers
from tfcluster.base.errors import ConfigError, ExitCode, Problem
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
    description = _load(path, overrides, environ, passed)
    scheduler = schedulers.batch_scheduler(description.backend)
    if scheduler is not None and not scheduler.is_inside(environ):
        return _examine_here(
            description, scheduler, environ, display, as_json=as_json, quick=quick
        )
    backend = schedulers.get(description.backend)
    prepared = prepare(description, backend.allocate(description, environ))
    requirements = _requirements(prepared, quick=quick)
    starter = backend.starter(description, environ)
    reports = examine(prepared.allocation.hosts, starter, requirements)
    found = findings(reports, _wanted_gpus(prepared), prepared.description.remedy)
    return _answer(reports, found, environ, display, as_json=as_json)


def _load(
    path: str,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    passed: Sequence[str],
) -> Description:
    """The Description in a file, whose warnings are shown."""
    loaded = config.load(path, overrides=overrides, environ=environ, passed=passed)
    for problem in loaded.warnings:
        say(sanitise(str(problem)))
    return loaded.description


def _this_machine() -> Host:
    return Host(name=os.uname().nodename, address="127.0.0.1")


def _examine_here(
    description: Description,
    scheduler: BatchScheduler,
    environ: Mapping[str, str],
    display: Display,
    *,
    as_json: bool,
    quick: bool,
) -> int:
    """Examine this host, outside of a job, which would submit the job.

    The nodes may have other interpreters and disks, but most likely the same files.
    """
    prepared = prepare(description, scheduler.expected(description))
    requirements = _requirements(prepared, quick=quick)
    here = _this_machine()
    reports = examine((here,), OwnHostStarter(), requirements)
    found = [
        finding
        if finding.text.startswith("there is no ")
        else replace(finding, error=False)
        for finding in findings(reports, {}, description.remedy)
    ]
    program = scheduler.submit_command
    if shutil.which(program, path=environ.get("PATH")) is None:
        text = f"there is no {program} on the PATH (load {scheduler.title}'s module)"
        found.append(Finding(here.name, text))
    code = _answer(reports, found, environ, display, as_json=as_json)
    if not display.quiet:
        say(
            f"not inside a job of {scheduler.title}: its nodes can be checked only "
            "from inside one; only this host was checked"
        )
    return code


def _requirements(prepared: PreparedLaunch, *, quick: bool) -> ProbedRequirements:
    description = prepared.description
    ports = description.ports
    return ProbedRequirements(
        python=description.python,
        workdir=None if description.sync else str(description.workdir),
        scripts=_scripts(prepared),
        imports=not quick,
        low=ports.low if ports else None,
        high=ports.high if ports else None,
        prepare=_preparing(description),
        say=lambda text: say(sanitise(text)),
        unprepared=partial(unprepared_cause, description),
        own_python=partial(changed_python, description),
    )


def _preparing(description: Description) -> Callable[[Host], Prepare] | None:
    """Makes the request that prepares a host as a launch does; None: none is needed."""
    if not description.prepares_hosts:
        return None
    # A folder that has not been copied yet does not exist on the hosts.
    cwd = "/" if description.sync else str(description.workdir)
    asked = description.requirements
    digest = None if asked is None else requirements_digest(asked)
    null = "/dev/null"
    return partial(prepare_request, description, cwd=cwd, log=null, digest=digest)


def _answer(
    reports: Mapping[str, HostAnswers],
    found: Sequence[Finding],
    environ: Mapping[str, str],
    display: Display,
    *,
    as_json: bool,
) -> int:
    if as_json:
        put(json.dumps(to_json(reports, list(found)), indent=1) + "\n")
    else:
        if not display.quiet:
            put("".join(f"{line}\n" for line in _shown(reports, display)))
        _tell(found, environ, display)
    if any(finding.unreachable for finding in found):
        return ExitCode.HOST
    return ExitCode.START if any(f.error for f in found) else ExitCode.OK


def _shown(reports: Mapping[str, HostAnswers], display: Display) -> list[str]:
    known = {n: report for n, report in reports.items() if report.facts}
    lines = table([[sanitise_word(c) for c in row] for row in rows(known)], HEADER)
    if display.everything:
        for name, report in known.items():
            lines += ["", sanitise_word(name)]
            lines += [f"  {sanitise(line)}" for line in fact_lines(report)]
    return lines


def _scripts(prepared: PreparedLaunch) -> tuple[str, ...]:
    """The scripts that tasks run, as given in their commands."""
    programs = {spec.arguments[1] for spec in prepared.specs if len(spec.arguments) > 1}
    return tuple(sorted(p for p in programs if p not in ("-m", "-c")))


def _wanted_gpus(prepared: PreparedLaunch) -> dict[str, int]:
    groups = prepared.description.tasks
    wanted: dict[str, int] = {}
    for spec in prepared.specs:
        host = spec.place.host.name
        wanted[host] = wanted.get(host, 0) + (groups[spec.task.type].gpus or 0)
    return wanted


def _tell(
    found: Sequence[Finding], environ: Mapping[str, str], display: Display
) -> None:
    style = style_of(sys.stderr, environ, colours=display.colours)
    for finding in found:
        paint = style.red if finding.error else style.yellow
        say(paint(sanitise(str(finding))))
    if not found and not display.quiet:
        say(style.green("no problems found"))


def setup(
    path: str,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    *,
    passed: Sequence[str] = (),
) -> int:
    """Run the setup lines and make the environment on every host.

    Prints the interpreter of each host. Returns the exit code with which a launch would
    fail. Raises TfclusterError.
    """
    description = _load(path, overrides, environ, passed)
    if not description.prepares_hosts:
        message = "there is nothing to set up"
        hint = "'requirements' or 'setup' says what hosts need"
        raise ConfigError([Problem(description.source, message, hint)])
    _refuse_files_to_copy(description)
    scheduler = schedulers.batch_scheduler(description.backend)
    outside = scheduler is not None and not scheduler.is_inside(environ)
    hosts: Sequence[Host] = (_this_machine(),)
    starter: Starter = OwnHostStarter()
    if not outside:
        backend = schedulers.get(description.backend)
        allocation = backend.allocate(description, environ)
        hosts = prepare(description, allocation).allocation.hosts
        starter = backend.starter(description, environ)
    reports = examine(hosts, starter, _setup_requirements(description))
    if scheduler is not None and outside:
        say(
            f"not inside a job of {scheduler.title}: only this host was set up, which "
            "suffices if its nodes share your home folder"
        )
    return _setup_answer(reports, description)


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


def _setup_requirements(description: Description) -> ProbedRequirements:
    return ProbedRequirements(
        python=description.python,
        workdir=None,
        scripts=(),
        imports=False,
        prepare=_preparing(description),
        probes=False,
        unprepared=partial(unprepared_cause, description),
        own_python=partial(changed_python, description),
        say=lambda text: say(sanitise(text)),
    )


def _setup_answer(reports: Mapping[str, HostAnswers], description: Description) -> int:
    ready = {n: r for n, r in reports.items() if r.error is None}
    rows = [
        (name, shlex.join(report.host.task_python or description.python))
        for name, report in ready.items()
    ]
    cells = [[sanitise_word(cell) for cell in row] for row in rows]
    put("".join(f"{line}\n" for line in table(cells, ("host", "python"))))
    failed = [report for report in reports.values() if report.error is not None]
    for report in failed:
        say(sanitise(f"{report.host.name}: error: {report.error}"))
    if any(report.unreachable for report in failed):
        return ExitCode.HOST
    return ExitCode.START if failed else ExitCode.OK
