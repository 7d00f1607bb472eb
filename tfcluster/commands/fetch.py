"""The command ``fetch``: get what tasks have written on hosts that share no files."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfcluster import schedulers
from tfcluster.base.errors import (
    ConfigError,
    ContactLostError,
    ExitCode,
    HostError,
    Problem,
)
from tfcluster.base.states import RunState
from tfcluster.base.vocabulary import FORMAT_VERSION
from tfcluster.commands.launcher_requests import LauncherRequest
from tfcluster.console.output import put, say
from tfcluster.console.sanitise import sanitise
from tfcluster.console.screen import Screen
from tfcluster.console.views.results import progress_text, result_lines
from tfcluster.plan.host_patterns import fold
from tfcluster.plan.model import Description, pattern_problem
from tfcluster.protocol.commands import Fetch
from tfcluster.record.files import read_json
from tfcluster.record.launched import resized
from tfcluster.record.liveness import identity
from tfcluster.record.load_run import read_run
from tfcluster.record.paths import RunPaths, find, state_dir
from tfcluster.record.replay import results_view
from tfcluster.record.run_status import ResultsView, RunView

if TYPE_CHECKING:
    from tfcluster.documents import run as documents
_LOOK_S = 2.0
"""How often to check whether the launcher is still alive."""
_CLOSE_S = 2.0
_LIKE_PATTERNS = frozenset("*?[/")


def fetch(
    words: Sequence[str],
    environ: Mapping[str, str],
    *,
    every: bool,
    force: bool,
    as_json: bool,
) -> int:
    """Fetch files of a run; returns 1 if some could not be fetched.

    ``words`` is ``[RUN] [PATTERN...]``. Raises TfclusterError.
    """
    paths, patterns = _split(words, environ)
    description = resized(paths)
    view = read_run(paths, now_s=time.time())
    configured = description.results
    if not patterns and configured is None:
        hint = "name patterns of files, or set 'workdir: {results: [...]}'"
        raise ConfigError([Problem(paths.run, "it has no 'results'", hint)])
    every = every or (not patterns and configured is not None and configured.all)
    wanted = patterns or (() if configured is None else configured.patterns)
    if schedulers.get(description.backend).here:
        say(sanitise(f"all tasks ran on this machine, in {description.workdir}"))
        return _end(paths, description, [], as_json=as_json)
    if view.launcher is None:
        hint = "`tfcluster status` tells what it waits for"
        raise ConfigError([Problem(paths.run, "it has not started yet", hint)])
    screen = Screen(None, sys.stderr, environ=environ)
    try:
        found = None
        if not view.state.final:
            found = _from_launcher(paths, view, wanted, screen, every, force)
        if found is None:
            found = _afterwards(
                description, paths, view, wanted, environ, screen, every, force
            )
    finally:
        screen.live(None)
        screen.close(_CLOSE_S)
    for each in found:
        for line in result_lines(each):
            say(line)
    return _end(paths, description, found, as_json=as_json)


def _end(
    paths: RunPaths,
    description: Description,
    found: Sequence[ResultsView],
    *,
    as_json: bool,
) -> int:
    if as_json:
        hosts = [each.to_json() for each in found]
        folder = str(description.workdir)
        given: documents.FetchReport = {
            "schema": FORMAT_VERSION,
            "run": paths.run,
            "folder": folder,
            "hosts": hosts,
        }
        put(json.dumps(given, indent=1) + "\n")
    incomplete = any(each.state == "incomplete" for each in found)
    return ExitCode.TASK_FAILED if incomplete else ExitCode.OK


def _split(
    words: Sequence[str], environ: Mapping[str, str]
) -> tuple[RunPaths, tuple[str, ...]]:
    """The run, and the patterns. The first word is the run, unless it looks like a
    pattern and there is no such run. Raises ConfigError."""
    state = state_dir(environ)
    try:
        paths, patterns = find(state, words[0] if words else None), tuple(words[1:])
    except ConfigError as error:
        if not words:
            raise
        newest = find(state, None)
        if not _LIKE_PATTERNS & set(words[0]):
            unknown = error.problems[0]
            hint = f"{unknown.hint}; a file: `tfcluster fetch {newest.run} {words[0]}`"
            raise ConfigError([unknown._replace(hint=hint)]) from error
        paths, patterns = newest, tuple(words)
    problems = [
        Problem("PATTERN", f"{pattern!r} {wrong}", 'for example "*.keras" or logs/')
        for pattern in patterns
        if (wrong := pattern_problem(pattern))
    ]
    if problems:
        raise ConfigError(problems)
    return paths, patterns


# --- a run that is active --------------------------------------------------------


def _from_launcher(
    paths: RunPaths,
    view: RunView,
    patterns: Sequence[str],
    screen: Screen,
    every: bool,
    force: bool,
) -> list[ResultsView] | None:
    """Have the launcher fetch, and wait until it has. Raises ContactLostError.

    Returns None if the run has ended before the launcher saw the request.
    """
    request = LauncherRequest(paths, Fetch(tuple(patterns), every, force))
    looked_s = time.monotonic()
    hosts: list[str] | None = None
    found: dict[str, ResultsView] = {}
    while hosts is None or len(found) < len(hosts):
        for event in request.wait():
            if event.get("request") != request.number:
                continue
            if event["type"] == "fetch":
                hosts = [str(host) for host in event.get("hosts") or ()]
            elif event["type"] == "results":
                found[str(event.get("host"))] = results_view(event)
        if hosts is None:
            request.require_answer()
        now_s = time.monotonic()
        if now_s - looked_s > _LOOK_S:
            looked_s = now_s
            if _has_ended(paths) and hosts is None:
                request.withdraw()
                return None
        if hosts is not None:
            screen.live(_progress(paths, request.number))
    launcher = view.launcher
    if launcher is not None and launcher.host != identity().host:
        screen.say(f"the launcher runs on {launcher.host}: the files are there")
    return list(found.values())


def _has_ended(paths: RunPaths) -> bool:
    """Whether the run is over. Raises ContactLostError if its launcher has died."""
    view = read_run(paths, now_s=time.time())
    if view.state is RunState.LOST:
        raise ContactLostError(
            f"the launcher of {paths.run} is gone: {view.reason}",
            hint=f"tfcluster fetch {paths.run}",
        )
    return view.state.final


def _progress(paths: RunPaths, number: str) -> str:
    known = read_json(paths.fetching) or {}
    hosts = known.get("hosts")
    if known.get("request") != number or not isinstance(hosts, dict):
        return "waiting for another fetch, or for a list of files"
    return progress_text(hosts)


# --- a run that is over ----------------------------------------------------------


def _afterwards(
    description: Description,
    paths: RunPaths,
    view: RunView,
    patterns: Sequence[str],
    environ: Mapping[str, str],
    screen: Screen,
    every: bool,
    force: bool,
) -> list[ResultsView]:
    """Fetch through new agents. Raises HostError if no host can be reached."""
    # These imports include the launcher, which takes longer than the rest.
    from tfcluster.launcher.late_results import fetch_late
    from tfcluster.launcher.results import event_fields

    chosen = _hosts(read_json(paths.plan) or {}, every=every)
    backend = schedulers.get(description.backend)
    if not backend.lists_hosts:
        sync, root = description.sync, description.workdir
        folder = root if sync is None else sync.folder
        raise HostError(
            f"{paths.run} is over, and so is its {description.backend} job: its hosts "
            f"({fold(chosen)}) cannot be reached through the scheduler any more",
            hint=f"the files were in {folder} there; if you can log in, copy them with "
            "scp or rsync",
        )
    starter = backend.starter(description, environ)
    by_name = {host.name: host for host in description.hosts}
    found = fetch_late(
        description,
        [by_name[name] for name in chosen if name in by_name],
        starter,
        tuple(patterns),
        apart=every,
        force=force,
        show=lambda outcomes: screen.live(
            progress_text(
                {
                    each.host: {"bytes": each.done_bytes, "of_bytes": each.bytes}
                    for each in outcomes.values()
                }
            )
        ),
    )
    errors = [error for _, error in found if error is not None]
    if errors and len(errors) == len(found):
        for error in errors[1:]:
            screen.say(error.message)
        raise errors[0]
    folder = str(description.workdir)
    return [results_view(event_fields(each, None, folder)) for each, _ in found]


def _hosts(plan: Mapping[str, Any], *, every: bool) -> list[str]:
    """The hosts of all tasks, or only the host of rank 0, in the plan's order."""
    tasks = [task for task in plan.get("tasks") or () if isinstance(task, dict)]
    ranked = [task for task in tasks if task.get("rank") == 0]
    chosen = tasks if every else (ranked or tasks[:1])
    return list(dict.fromkeys(str(task.get("host")) for task in chosen))
