"""``doctor`` from the words of the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence

from tfcluster import backends, config
from tfcluster.console.output import put, say
from tfcluster.console.sanitise import sanitise, sanitise_word
from tfcluster.console.style import style_of
from tfcluster.console.text import table
from tfcluster.doctor.examine import Wishes, examine
from tfcluster.doctor.findings import HEADER, Finding, findings, rows, to_json
from tfcluster.errors import ExitCode
from tfcluster.launcher.launch import Prepared, prepare


def doctor(
    path: str,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    *,
    as_json: bool,
    quick: bool,
) -> int:
    """Examine the hosts of a file; 4 where a launch would fail."""
    description = config.load(path, overrides=overrides, environ=environ).description
    backend = backends.get(description.backend)
    prepared = prepare(description, backend.allocate(description, environ))
    ports = description.ports
    wishes = Wishes(
        python=description.python,
        workdir=None if description.sync else str(description.workdir),
        scripts=_scripts(prepared),
        imports=not quick,
        low=ports.low if ports else None,
        high=ports.high if ports else None,
    )
    starter = backend.starter(description, environ)
    reports = examine(prepared.allocation.hosts, starter, wishes)
    found = findings(reports, _wanted_gpus(prepared))
    if as_json:
        put(json.dumps(to_json(reports, found), indent=1) + "\n")
    else:
        lines = table(
            [[sanitise_word(c) for c in row] for row in rows(reports)], HEADER
        )
        put("\n".join(lines) + "\n")
        _tell(found, environ)
    grave = any(finding.error for finding in found)
    return ExitCode.START if grave else ExitCode.OK


def _scripts(prepared: Prepared) -> tuple[str, ...]:
    """The scripts that tasks run, as their commands name them."""
    programs = {spec.arguments[1] for spec in prepared.specs if len(spec.arguments) > 1}
    return tuple(sorted(p for p in programs if p not in ("-m", "-c")))


def _wanted_gpus(prepared: Prepared) -> dict[str, int]:
    groups = prepared.description.tasks
    wanted: dict[str, int] = {}
    for spec in prepared.specs:
        host = spec.place.host.name
        wanted[host] = wanted.get(host, 0) + (groups[spec.task.type].gpus or 0)
    return wanted


def _tell(found: Sequence[Finding], environ: Mapping[str, str]) -> None:
    style = style_of(sys.stderr, environ)
    for finding in found:
        paint = style.red if finding.error else style.yellow
        say(paint(sanitise(str(finding))))
    if not found:
        say(style.green("no problems found"))
