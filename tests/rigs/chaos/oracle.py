"""What must be true after a trial: of the record, the logs and the first cause.

Each function returns violations, as sentences. Only reads.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.json_formats import assert_format
from tests.rigs.chaos.faults import END, START, Blame, Fault

KILLED = -signal.SIGKILL
_FINAL = {"succeeded", "failed", "stopped", "lost"}
_OWN = re.compile(r"tfcluster itself failed|Traceback \(most recent call last\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """One fault that was injected, as far as the record can tell of it."""

    fault: Fault
    phase: str
    host: str | None
    task: str | None

    @property
    def codes(self) -> frozenset[int]:
        found = self.fault.codes
        if self.phase == START and self.fault.blame is Blame.HOST:
            found |= {3, 4}
        if self.phase in (START, END):
            # The run may have been over, or the process not needed any more.
            found |= {0}
        if self.phase == START and self.fault.blame is Blame.LAUNCHER:
            found |= {4}
        return found


def outcome(
    code: int | None, status: Mapping[str, Any], injected: Sequence[Injected]
) -> Iterator[str]:
    """The exit code and the first failure are those of the first fault.

    ``injected`` holds several faults only if the first one had not been noticed when
    the second came; then either may be named. ``code``: None if the command that the
    user had started was killed.
    """
    allowed = frozenset({0}) if not injected else frozenset()
    for each in injected:
        allowed |= each.codes
    if code is not None and code not in allowed:
        yield f"exit code {code}, expected {_listed(allowed)}"
    wrong = [list(_blamed(status, each)) for each in injected]
    if injected and all(wrong):
        yield wrong[0][0]
    state = status.get("state")
    if state not in _FINAL:
        yield f"the run's state is {state!r}"
    for task in status.get("tasks", ()):
        if task["state"] not in _FINAL:
            yield f"the state of {task['task']} is {task['state']!r}"
    recorded = status.get("exit_code")
    if code is not None and code != KILLED and recorded != code:
        yield f"exit code {code}, but {recorded} in the record"
    if (state == "succeeded") != (recorded == 0):
        yield f"the run has {state}, with exit code {recorded}"


def _blamed(status: Mapping[str, Any], injected: Injected) -> Iterator[str]:
    fault, named = injected.fault, status.get("first_failure") or {}
    if status.get("state") == "succeeded" and 0 in injected.codes:
        return
    told = f"{named.get('task')} on {named.get('host')}: {named.get('cause')}"
    told = f"first failure {told!r}" if named else "no first failure"
    if fault.blame is Blame.LAUNCHER:
        found = status.get("state"), status.get("exit_code")
        recorded_nothing = "before the launcher recorded" in str(named.get("cause"))
        if found != ("lost", 5) and not (found == ("failed", 4) and recorded_nothing):
            yield f"the launcher was killed, but the run has {status.get('state')}"
    elif fault.blame is Blame.TASK:
        found = named.get("task"), named.get("signal")
        if found != (injected.task, "SIGKILL"):
            yield f"{told}; {injected.task} was killed"
    elif fault.blame in (Blame.HOST, Blame.PERHAPS_HOST):
        host = str(named.get("host") or "").partition(".")[0]
        in_words = str(injected.host) in str(named.get("cause"))
        fits = host == injected.host or in_words or (injected.host is None and host)
        if named.get("task") or not fits:
            yield f"{told}; it was {fault.name} of {injected.host}"
    elif fault.blame is Blame.ANY_HOST:
        if named.get("task") or not named.get("host"):
            yield f"{told}; it was {fault.name}"
    elif status.get("state") != "succeeded":
        yield f"the run has {status.get('state')}, {told}; {fault.name} is harmless"


def _listed(codes: frozenset[int]) -> str:
    return " or ".join(map(str, sorted(codes)))


# --- files --------------------------------------------------------------------------


def record(folder: Path, status: Mapping[str, Any], *, reported: bool) -> Iterator[str]:
    """The files of the record are whole. ``reported``: the launcher lived on."""
    for path in sorted(folder.glob("*.json")):
        try:
            json.loads(path.read_text())
        except ValueError as error:
            yield f"{path.name} is damaged: {error}"
    for name in ("events.jsonl", "metrics.ndjson"):
        if (folder / name).exists():
            yield from _lines(folder / name, whole=reported)
    try:
        assert_format("status", status)
    except AssertionError as error:
        yield f"status --json: {str(error)[:300]}"
    if not reported:
        return
    try:
        written = json.loads((folder / "report.json").read_text())
    except (OSError, ValueError) as error:
        yield f"report.json: {error}"
        return
    for key in ("state", "exit_code", "tasks", "first_failure"):
        if written[key] != status[key]:
            yield f"report.json has another {key}: {written[key]}, {status[key]}"


def _lines(path: Path, *, whole: bool) -> Iterator[str]:
    data = path.read_bytes()
    *lines, rest = data.split(b"\n")
    if rest and whole:
        yield f"{path.name} ends in the middle of a line: {rest[:80]!r}"
    before = 0.0
    for number, line in enumerate(lines, 1):
        try:
            at = json.loads(line)["t"]
        except (ValueError, KeyError, TypeError) as error:
            yield f"{path.name}, line {number} is damaged: {error}"
            return
        if path.name == "events.jsonl" and at < before - 0.001:
            yield f"{path.name}, line {number} is older than the one before"
        before = at


def words(said: str) -> Iterator[str]:
    """What users read has no traceback of ours, and no crash."""
    if found := _OWN.search(said):
        yield f"{said[found.start() :][:300]!r} was printed"


# --- output of the stub -------------------------------------------------------------


def log_of_stub(text: str, *, ended: bool, gaps: bool = False) -> Iterator[str]:
    """A log of the stub: its lines in order, none missing, to the last one.

    ``ended``: the stub ended by itself. ``gaps``: the disk was full for a while.
    """
    lines = text.split("\n")
    if lines.pop() and ended:
        yield "the log ends in the middle of a line"
    if gaps or not lines:
        return
    if lines[0] != "up":
        yield f"the log begins with {lines[0]!r}"
        return
    body = lines[1:]
    if ended:
        last = f"done {len(body) - 1}"
        if not body or body[-1] != last:
            yield f"the log ends with {lines[-1]!r} instead of {last!r}"
            return
        body = body[:-1]
    elif body and body[-1].startswith("done "):
        body = body[:-1]
    for number, line in enumerate(body):
        if line != f"line {number}":
            yield f"the log has {line!r} instead of 'line {number}'"
            return


def echo_of_stub(out: str, task: str, log: str) -> Iterator[str]:
    """Standard output has every line of the log, unless it says that it has not."""
    if "not shown" in out:
        return
    prefix = f"{task} | "
    shown = [
        line.removeprefix(prefix)
        for line in out.splitlines()
        if line.startswith(prefix)
    ]
    written = log.splitlines()
    if shown != written:
        yield f"{len(shown)} lines of {task} were shown, {len(written)} are in its log"
