"""Turns the facts that hosts report into findings and a table. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, cast

from tfcluster.base.versions import OLDEST, too_old, unknown
from tfcluster.base.vocabulary import FORMAT_VERSION
from tfcluster.doctor.probe_hosts import HostAnswers
from tfcluster.launcher.host_facts import CLOCK_S

if TYPE_CHECKING:
    from tfcluster.documents import checks as documents

OLDEST_PYTHON = (3, 10)
FREE_BYTES = 100 << 20
OPEN_FILES = 1024
SLOW_IMPORT_S = 30.0
BUSY_MIB = 1024

HEADER = ("host", "address", "python", "tensorflow", "keras", "import", "GPUs", "clock")


@dataclass(frozen=True, slots=True)
class Finding:
    host: str
    text: str
    error: bool = True
    unreachable: bool = False

    def __str__(self) -> str:
        return f"{self.host}: {'error' if self.error else 'warning'}: {self.text}"


def findings(
    reports: Mapping[str, HostAnswers], gpus: Mapping[str, int], remedy: str
) -> list[Finding]:
    """All problems. ``gpus`` has the number that a launch needs on each host;
    ``remedy`` says what to do if a package is missing."""
    problems: list[Finding] = []
    for name, report in reports.items():
        if report.error is not None:
            unreachable = report.unreachable
            problems.append(Finding(name, report.error, unreachable=unreachable))
            continue
        pairs = [*_of_host(report, remedy), *_gpus(report, gpus.get(name, 0))]
        problems += [Finding(name, *pair) for pair in pairs]
    return problems + _differences(reports)


def _of_host(report: HostAnswers, remedy: str) -> Iterator[tuple[str, bool]]:
    facts = report.facts
    if not report.address:
        text = "no address at which the other hosts can reach it; give it an 'address'"
        yield text, True
    if _numbers(facts.get("python")) < OLDEST_PYTHON:
        yield f"Python {facts.get('python')} is older than 3.10", True
    if facts.get("marked") is False:
        text = "the command of 'python' removes variables from the environment"
        yield f"{text} (leave out --cleanenv, --clearenv, env -i)", True
    tensorflow = _package(report, "tensorflow")
    if tensorflow is None:
        which = facts.get("executable") or "this Python"
        yield f"TensorFlow is not installed for {which} ({remedy})", True
    for package in OLDEST:
        if problem := too_old(package, _package(report, package)):
            yield problem, True
        if warning := unknown(package, _package(report, package)):
            yield warning, False
    imported = _mapping(facts.get("import"))
    if cause := imported.get("error"):
        yield f"import tensorflow: {cause}", True
    elif (imported.get("seconds") or 0) > SLOW_IMPORT_S:
        yield f"import tensorflow takes {imported['seconds']} s", False
    files = _mapping(facts.get("files"))
    folder = next((path for path in files if path.startswith("/")), "")
    for path, there in files.items():
        if not there:
            yield f"there is no {PurePosixPath(folder, path)}", True
    for peer, result in _mapping(facts.get("peers")).items():
        if result != "reached":
            yield f"cannot reach {peer}: {result}", True
    for path, free in _mapping(facts.get("disks")).items():
        if isinstance(free, int) and free < FREE_BYTES:
            yield f"{path} has only {free >> 20} MiB left", False
    allowed = _mapping(facts.get("limits")).get("open files", -1)
    if 0 <= allowed < OPEN_FILES:
        yield f"only {allowed} open files are allowed (ulimit -n)", False
    if report.clock_error_s is not None and abs(report.clock_error_s) > CLOCK_S:
        yield f"its clock is {report.clock_error_s:+.0f} s off", False


def _gpus(report: HostAnswers, wanted: int) -> Iterator[tuple[str, bool]]:
    gpus = report.facts.get("gpus")
    if not isinstance(gpus, list):
        return
    if len(gpus) < wanted:
        yield f"{len(gpus)} GPUs found, {wanted} wanted", True
    for number, gpu in enumerate(gpus):
        if gpu["used_mib"] > BUSY_MIB:
            yield f"GPU {number} is in use ({gpu['used_mib']} MiB)", False


def _differences(reports: Mapping[str, HostAnswers]) -> list[Finding]:
    """Package versions that differ from those of most hosts."""
    problems: list[Finding] = []
    well = {name: report for name, report in reports.items() if report.error is None}
    for package in ("tensorflow", "keras", "protobuf"):
        versions = {name: _package(report, package) for name, report in well.items()}
        counted = Counter(filter(None, versions.values())).most_common(1)
        for name, version in versions.items():
            if version is None or version == (usual := counted[0][0]):
                continue
            grave = package == "tensorflow" and _numbers(version) != _numbers(usual)
            text = f"{package} {version}, but {usual} on most hosts"
            problems.append(Finding(name, text, grave))
    return problems


def rows(reports: Mapping[str, HostAnswers]) -> list[tuple[str, ...]]:
    """The rows of the table, one per host; the columns are those of HEADER."""
    table: list[tuple[str, ...]] = []
    for name, report in reports.items():
        imported = _mapping(report.facts.get("import")).get("seconds")
        gpus = report.facts.get("gpus")
        clock = report.clock_error_s
        table.append(
            (
                name,
                report.address,
                str(report.facts.get("python", "")),
                _package(report, "tensorflow") or "",
                _package(report, "keras") or "",
                "" if imported is None else f"{imported} s",
                str(len(gpus)) if isinstance(gpus, list) else "",
                "" if clock is None else f"{clock:+.1f} s",
            )
        )
    return table


def fact_lines(report: HostAnswers) -> list[str]:
    lines: list[str] = []
    for name, value in report.known_facts.items():
        if isinstance(value, Mapping):
            lines += [f"{name}: {key}: {part}" for key, part in value.items()]
        else:
            lines.append(f"{name}: {value}")
    return lines


def to_json(
    reports: Mapping[str, HostAnswers], problems: list[Finding]
) -> documents.Diagnosis:
    """All facts and findings, for programs."""
    return {
        "schema": FORMAT_VERSION,
        "hosts": [
            {
                "host": name,
                "address": report.address or None,
                "error": report.error,
                "clock_error_s": report.clock_error_s,
                "facts": cast("documents.HostFacts", report.known_facts),
            }
            for name, report in reports.items()
        ],
        "findings": [
            {"host": f.host, "text": f.text, "error": f.error} for f in problems
        ],
    }


def _package(report: HostAnswers, name: str) -> str | None:
    version = _mapping(report.facts.get("packages")).get(name)
    return version if isinstance(version, str) else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _numbers(version: Any) -> tuple[int, ...]:
    """``(2, 21)`` for ``2.21.0``; () if it is not a version, which sorts first."""
    parts = str(version).split(".")[:2]
    return tuple(int(p) for p in parts) if all(p.isdecimal() for p in parts) else ()
