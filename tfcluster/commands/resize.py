"""The command ``resize``: give a run another number of workers, or more hosts."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence

from tfcluster.commands.launcher_request import LauncherRequest
from tfcluster.console.output import say
from tfcluster.console.sanitise import sanitise
from tfcluster.errors import ConfigError, ExitCode, Problem
from tfcluster.host_patterns import HostlistError, expand, host_name_problem
from tfcluster.protocol.commands import NewHost, Resize
from tfcluster.record.events import Event
from tfcluster.record.load_run import read_run
from tfcluster.record.paths import RunPaths, find, state_dir
from tfcluster.states import RunState

_HINT = "worker=8, hosts+=node9 or hosts+=node[9-12]:4"
_WORKERS = re.compile(r"worker=([0-9]{1,6})")
_SLOTS = re.compile(r"(.+):([0-9]{1,6})")


def resize(words: Sequence[str], environ: Mapping[str, str], *, now: bool) -> int:
    """Ask the launcher of a run to resize it. Raises TfclusterError.

    ``words`` is ``[RUN] CHANGE...``. Returns once the launcher has taken the request.
    """
    run, request = parse(words, now=now)
    paths = find(state_dir(environ), run)
    view = read_run(paths, now_s=time.time())
    if view.state is not RunState.RUNNING or view.launcher is None:
        hint = "only a run whose tasks all run can be resized"
        raise ConfigError([Problem(paths.run, f"it is {view.state}", hint)])
    answer = _ask(paths, request)
    if problems := answer.get("problems"):
        found = problems if isinstance(problems, list) else [problems]
        raise ConfigError([Problem(paths.run, str(each)) for each in found])
    before, after = answer.get("before"), answer.get("workers")
    say(sanitise(f"{paths.run} is resized from {before} to {after} workers"))
    hosts = answer.get("hosts")
    if isinstance(hosts, list) and hosts:
        named = ", ".join(map(str, hosts))
        say(sanitise(f"{named}: made ready while the other hosts train"))
    say(f"`tfcluster status {paths.run}` shows when its tasks restart")
    return ExitCode.OK


def parse(words: Sequence[str], *, now: bool) -> tuple[str | None, Resize]:
    """The run, if it is named, and the request. Raises ConfigError."""
    run = words[0] if words and "=" not in words[0] else None
    problems: list[Problem] = []
    workers: int | None = None
    hosts: list[NewHost] = []
    changes = words if run is None else words[1:]
    for word in changes:
        key, _, value = word.partition("=")
        if key == "worker":
            match = _WORKERS.fullmatch(word)
            if match is None:
                problems.append(Problem(word, "is not a number of workers", _HINT))
            elif workers is not None:
                problems.append(Problem(word, "'worker' is given twice"))
            else:
                workers = int(match[1])
        elif key == "hosts+":
            hosts += _hosts(word, value, problems)
        elif key in ("ps", "chief", "evaluator", "data"):
            problems.append(Problem(word, f"{key} tasks cannot be resized", _HINT))
        else:
            problems.append(Problem(word, "is not a change", _HINT))
    if not changes:
        problems.append(Problem("resize", "nothing to change", _HINT))
    if problems:
        raise ConfigError(problems)
    return run, Resize(workers, tuple(hosts), now)


def _hosts(word: str, value: str, problems: list[Problem]) -> list[NewHost]:
    match = _SLOTS.fullmatch(value)
    pattern, slots = (match[1], int(match[2])) if match else (value, None)
    try:
        names = expand(pattern)
    except HostlistError as error:
        problems.append(Problem(word, error.message, _HINT))
        return []
    for name in names:
        if problem := host_name_problem(name):
            problems.append(Problem(word, f"{name[:60]!r} {problem}", _HINT))
            return []
    return [NewHost(name, slots) for name in names]


def _ask(paths: RunPaths, request: Resize) -> Event:
    """The launcher's answer. Raises ContactLostError."""
    asked = LauncherRequest(paths, request)
    while True:
        for event in asked.wait():
            if event["type"] == "resize" and event.get("request") == asked.number:
                return event
        asked.require_answer()
