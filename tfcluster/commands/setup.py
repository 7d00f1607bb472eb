"""The command ``setup``: prepare all hosts as a launch does, and start nothing."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from functools import partial

from tfcluster import config, schedulers
from tfcluster.commands.doctor import preparing
from tfcluster.console.output import put, say
from tfcluster.console.sanitise import sanitise, sanitise_word
from tfcluster.console.text import table
from tfcluster.doctor.probe_hosts import HostAnswers, ProbedRequirements, examine
from tfcluster.errors import ConfigError, ExitCode, Problem
from tfcluster.launcher.launch import prepare
from tfcluster.launcher.preparation import changed_python, unprepared_cause
from tfcluster.model import Description, Host


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
    loaded = config.load(path, overrides=overrides, environ=environ, passed=passed)
    for problem in loaded.warnings:
        say(sanitise(str(problem)))
    description = loaded.description
    if not description.prepares_hosts:
        message = "there is nothing to set up"
        hint = "'requirements' or 'setup' says what hosts need"
        raise ConfigError([Problem(description.source, message, hint)])
    _refuse_files_to_copy(description)
    scheduler = schedulers.batch_scheduler(description.backend)
    outside = scheduler is not None and not scheduler.is_inside(environ)
    backend = schedulers.get("local" if outside else description.backend)
    hosts: Sequence[Host] = (Host(name=os.uname().nodename, address="127.0.0.1"),)
    if not outside:
        allocation = backend.allocate(description, environ)
        hosts = prepare(description, allocation).allocation.hosts
    reports = examine(
        hosts, backend.starter(description, environ), _requirements(description)
    )
    if scheduler is not None and outside:
        say(
            f"not inside a {scheduler.title} job: only this host was set up, which "
            "suffices if its nodes share your home folder"
        )
    return _answer(reports, description)


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


def _requirements(description: Description) -> ProbedRequirements:
    return ProbedRequirements(
        python=description.python,
        workdir=None,
        scripts=(),
        imports=False,
        prepare=preparing(description),
        probes=False,
        unprepared=partial(unprepared_cause, description),
        own_python=partial(changed_python, description),
        say=lambda text: say(sanitise(text)),
    )


def _answer(reports: Mapping[str, HostAnswers], description: Description) -> int:
    ready = {n: r for n, r in reports.items() if r.error is None}
    rows = [
        (name, shlex.join(report.python or report.host.python or description.python))
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
