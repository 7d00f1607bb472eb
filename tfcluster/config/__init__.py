"""Reads cluster.yaml, or the flags that replace it, into a checked ``Description``.

File or flags -> tree -> overrides -> shape -> rules -> Description, and all problems
are found in one pass. Importing this package is cheap: YAML is imported on use. It
reads only the configuration itself, contacts no host and resolves no name.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence

from tfcluster.base.errors import Problem
from tfcluster.base.light_dataclasses import dataclass
from tfcluster.config.describe import Describer, Setting, check_ports
from tfcluster.config.diagnostics import Findings, Report
from tfcluster.config.files import read_file
from tfcluster.config.models import ClusterSection
from tfcluster.config.overrides import COMMAND_LINE, from_flags, override, with_passed
from tfcluster.config.rules import check_rules, check_sections, check_unused
from tfcluster.config.sections import (
    cluster_model,
    mentioned,
    relevant,
    schema,
    starter,
)
from tfcluster.config.shape import Mistakes, read
from tfcluster.config.tree import (
    MAX_PATH,
    Map,
    Mark,
    Scalar,
    find,
    printable,
    put,
    shown,
    text,
    value,
    without,
)
from tfcluster.config.yaml11_scalars import EMPTY
from tfcluster.plan.model import Description

__all__ = ["Loaded", "as_name", "from_command", "load", "schema", "starter"]

_SMALLEST = "smallest valid config: {command: python train.py, tasks: {worker: 2}}"
_REMOVED = {
    "batch_normalization": "BatchNormalization does what it does on one machine",
    "on_difference": "every script gets the result of one machine",
}
"""Key of ``runtime`` -> why it is no longer needed."""


@dataclass(frozen=True, slots=True)
class Loaded:
    description: Description
    warnings: tuple[Problem, ...] = ()


def load(
    path: str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    name: str | None = None,
    arguments: Sequence[str] = (),
    environ: Mapping[str, str],
    python: str = sys.executable,
    passed: Sequence[str] = (),
) -> Loaded:
    """Read and check a configuration file.

    ``overrides`` are raw ``KEY=VALUE`` texts, ``name`` replaces the file's name,
    ``arguments`` are appended to every command, ``environ`` has the values of
    ``${VAR}``, ``python`` is the interpreter if the file names none, and ``passed`` has
    variables to pass on, as ``NAME`` or ``NAME=VALUE``. Raises ConfigError with all
    problems, sorted by place.
    """
    name_of_file = os.fspath(path)
    report = Report(printable(name_of_file, MAX_PATH))
    root = _read(name_of_file, report)
    file = pathlib.Path(name_of_file).absolute()
    setting = Setting(
        environ=environ,
        folder=file.parent,
        stem=as_name(file.stem),
        python=python,
        arguments=tuple(arguments),
    )
    return _loaded(root, overrides, name, passed, report, setting)


def from_command(
    command: Sequence[str],
    *,
    count: int,
    ps: int = 0,
    gpus: int | None = None,
    hosts: str | None = None,
    overrides: Sequence[str] = (),
    name: str | None = None,
    environ: Mapping[str, str],
    cwd: pathlib.Path,
    python: str = sys.executable,
    passed: Sequence[str] = (),
) -> Loaded:
    """The configuration given by flags alone: ``count`` workers that run ``command``.

    ``gpus`` is the number of GPUs of each worker. ``hosts`` is a hostlist in which
    ``name:4`` sets slots; without it all tasks run on this host. Raises ConfigError
    with all problems.
    """
    report = Report(COMMAND_LINE.source)
    root = from_flags(
        command, count=count, ps=ps, gpus=gpus, hosts=hosts, report=report
    )
    setting = Setting(
        environ=environ, folder=cwd, stem=as_name(command_stem(command)), python=python
    )
    return _loaded(root, overrides, name, passed, report, setting)


def _read(path: str, report: Report) -> Map:
    from tfcluster.config.parse import parse  # imported here: flags need no YAML

    start = Mark(report.source, 1, 1)
    root = parse(read_file(path, report), start, report)
    if root is None or (isinstance(root, Scalar) and root.value is EMPTY):
        raise report.failed(start, "the file is empty", _SMALLEST)
    if not isinstance(root, Map):
        message = f"expected a mapping, found {shown(root)}"
        raise report.failed(root.mark, message, _SMALLEST)
    return root


def _loaded(
    root: Map,
    overrides: Sequence[str],
    name: str | None,
    passed: Sequence[str],
    report: Report,
    setting: Setting,
) -> Loaded:
    root = _without_removed(override(root, overrides, report), report)
    if name is not None:
        root = put(root, ("name",), text(name, Mark("--name")))
    root = with_passed(root, passed, setting.environ, report)
    findings = Findings(root, report)
    cluster = _shape(findings)
    check_rules(cluster, findings)
    description = Describer(cluster, findings, setting).description()
    if findings.sound("ports", "tasks", "hosts", "backend"):
        check_ports(description, findings)
    check_sections(description, findings)
    report.check()
    check_unused(cluster, findings)
    return Loaded(description=description, warnings=report.warnings())


def _shape(findings: Findings) -> ClusterSection:
    """The values, checked one by one; invalid ones are left out."""
    data = value(findings.root)
    # Another scheduler than ours may be named as the backend, or have a section.
    backend = data.get("backend")
    names = {*data} | ({backend} if isinstance(backend, str) else {"local"})
    if "launcher" not in data:
        # Only what is needed to see that all is well: most schedulers are not used.
        mistakes = Mistakes()
        cluster = read(cluster_model(mentioned(names)), data, (), mistakes)
        if not mistakes.misfits:
            return cluster
    mistakes, model = Mistakes(), cluster_model(relevant(names))
    cluster = read(model, data, (), mistakes)
    if mistakes.misfits:
        # imported here: it is rarely needed
        from tfcluster.config.explain import explain

        for misfit in mistakes.misfits:
            explain(misfit, findings, model)
        findings.broken = {str(misfit.path[0]) for misfit in mistakes.misfits}
        findings.left_out = mistakes.left_out
    return cluster


def as_name(text: str) -> str:
    """``text`` with characters replaced that are not allowed in a name."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip(".-")[:64]
    return name or "run"


def command_stem(command: Sequence[str]) -> str:
    """The name of a run of ``command``: its script or module, or else its program."""
    program = pathlib.PurePath(command[0]).name if command else ""
    if not re.fullmatch(r"python[0-9.]*", program):
        return pathlib.PurePath(program).stem or program
    words = iter(command[1:])
    for word in words:
        if word == "-m":
            return next(words, program)
        if word == "-c":
            return program
        if word in ("-W", "-X"):
            next(words, None)
        elif not word.startswith("-"):
            return pathlib.PurePath(word).stem
    return program


def _without_removed(root: Map, report: Report) -> Map:
    """The tree without these keys; each has a warning."""
    for name, why in _REMOVED.items():
        place = find(root, ("runtime", name))
        if place.key and not place.rest:
            message = f"{name!r} is no longer needed: {why}"
            report.warn(place.key.mark, message, "remove it")
            root = without(root, ("runtime", name))
    return root
