"""Loads a file or flags into a checked Description, and finds all problems in one pass.

File or flags -> tree -> overrides -> shape -> rules -> Description.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Mapping, Sequence

from tfcluster.config.describe import Setting, check_ports, describe
from tfcluster.config.diagnostics import Findings, Report
from tfcluster.config.loaded import Loaded
from tfcluster.config.models import ClusterSection
from tfcluster.config.overrides import COMMAND_LINE, from_flags, named, override
from tfcluster.config.passed_variables import with_passed
from tfcluster.config.prune import without
from tfcluster.config.removed_keys import without_removed
from tfcluster.config.rules import check_rules, check_unused
from tfcluster.config.scheduler_rules import check_sections
from tfcluster.config.sections import cluster_model, known, mentioned
from tfcluster.config.shape import Wrong
from tfcluster.config.shape import read as read_section
from tfcluster.config.source import read_file
from tfcluster.config.text import MAX_PATH, printable
from tfcluster.config.tree import Map, Mark, Scalar, shown, value
from tfcluster.config.yaml11_scalars import EMPTY

_SMALLEST = "smallest valid config: {command: python train.py, tasks: {worker: 2}}"


def load(
    path: str | os.PathLike[str],
    *,
    overrides: Sequence[str],
    name: str | None,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    python: str,
    passed: Sequence[str] = (),
) -> Loaded:
    """See ``tfcluster.config.load``."""
    given = os.fspath(path)
    report = Report(printable(given, MAX_PATH))
    root = _read(given, report)
    file = pathlib.Path(given).absolute()
    setting = Setting(
        environ=environ,
        folder=file.parent,
        stem=as_name(file.stem),
        python=python,
        arguments=tuple(arguments),
    )
    root = _overridden(root, overrides, name, report)
    return _check(with_passed(root, passed, environ, report), report, setting)


def from_command(
    command: Sequence[str],
    *,
    count: int,
    ps: int,
    gpus: int | None,
    hosts: str | None,
    overrides: Sequence[str],
    name: str | None,
    environ: Mapping[str, str],
    cwd: pathlib.Path,
    python: str,
    passed: Sequence[str] = (),
) -> Loaded:
    """See ``tfcluster.config.from_command``."""
    report = Report(COMMAND_LINE.source)
    root = from_flags(
        command, count=count, ps=ps, gpus=gpus, hosts=hosts, report=report
    )
    setting = Setting(
        environ=environ, folder=cwd, stem=as_name(command_stem(command)), python=python
    )
    root = _overridden(root, overrides, name, report)
    return _check(with_passed(root, passed, environ, report), report, setting)


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


def _overridden(
    root: Map, overrides: Sequence[str], name: str | None, report: Report
) -> Map:
    root = without_removed(override(root, overrides, report), report)
    return root if name is None else named(root, name)


def _check(root: Map, report: Report, setting: Setting) -> Loaded:
    findings = Findings(root, report)
    cluster = _shape(findings)
    check_rules(cluster, findings)
    description = describe(cluster, findings, setting)
    if findings.sound("ports", "tasks", "hosts", "backend"):
        check_ports(description, findings)
    check_sections(description, findings)
    report.check()
    check_unused(cluster, findings)
    return Loaded(description=description, warnings=report.warnings())


def _shape(findings: Findings) -> ClusterSection:
    """The values, checked one by one; invalid ones are left out."""
    data = value(findings.root)
    whole = dict(data) if isinstance(data, dict) else {}
    # Another scheduler than ours may be named as the backend, or have a section.
    backend = whole.get("backend")
    names = {*whole} | ({backend} if isinstance(backend, str) else {"local"})
    if "launcher" not in whole:
        # Only what is needed to see that all is well: most schedulers are not used.
        cluster, wrong = _checked(cluster_model(mentioned(names)), whole)
        if not wrong:
            return cluster
    model = cluster_model(known(names))
    cluster, wrong = _checked(model, whole)
    if not wrong:
        return cluster
    from tfcluster.config.explain import explain  # imported here: it is rarely needed

    for each in wrong:
        explain(each, findings, model)
    findings.broken = frozenset(str(each.path[0]) for each in wrong)
    rest, findings.left_out = without(whole, [each.path for each in wrong])
    cluster, wrong = _checked(model, {"tasks": {}} | rest)
    if not wrong:
        return cluster
    # The rest of a key is not valid by itself: leave out the whole key.
    findings.left_out = {}
    rest = {k: v for k, v in whole.items() if k not in findings.broken}
    return _checked(model, {"tasks": {"worker": 1}} | rest)[0]


def _checked(
    model: type[ClusterSection], data: Mapping[str, object]
) -> tuple[ClusterSection, list[Wrong]]:
    wrong: list[Wrong] = []
    return read_section(model, data, (), wrong), wrong


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
