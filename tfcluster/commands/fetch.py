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
    from tfcluster.launcher.result_transfer import TransferOutcome

_CHECK_S = 2.0
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
    if not patterns:
        if configured is None:
            hint = "name patterns of files, or set 'workdir: {results: [...]}'"
            raise ConfigError([Problem(paths.run, "it has no 'results'", hint)])
        patterns, every = configured.patterns, every or configured.all
    request = Fetch(tuple(patterns), every, force)
    results = _fetched(description, paths, view, request, environ)
    for result in results:
        for line in result_lines(result):
            say(line)
    if as_json:
        report: documents.FetchReport = {
            "schema": FORMAT_VERSION,
            "run": paths.run,
            "folder": str(description.workdir),
            "hosts": [result.to_json() for result in results],
        }
        put(json.dumps(report, indent=1) + "\n")
    incomplete = any(result.state == "incomplete" for result in results)
    return ExitCode.TASK_FAILED if incomplete else ExitCode.OK


def _fetched(
    description: Description,
    paths: RunPaths,
    view: RunView,
    request: Fetch,
    environ: Mapping[str, str],
) -> list[ResultsView]:
    if schedulers.get(description.backend).here:
        say(sanitise(f"all tasks ran on this machine, in {description.workdir}"))
        return []
    if view.launcher is None:
        hint = "`tfcluster status` tells what it waits for"
        raise ConfigError([Problem(paths.run, "it has not started yet", hint)])
    screen = Screen(None, sys.stderr, environ=environ)
    try:
        results = None
        if not view.state.final:
            results = _from_launcher(paths, view.launcher.host, request, screen)
        if results is None:
            results = _afterwards(description, paths, request, environ, screen)
        return results
    finally:
        screen.live(None)
        screen.close(_CLOSE_S)


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
            problem = error.problems[0]
            hint = f"{problem.hint}; a file: `tfcluster fetch {newest.run} {words[0]}`"
            raise ConfigError([problem._replace(hint=hint)]) from error
        paths, patterns = newest, tuple(words)
    problems = [
        Problem("PATTERN", f"{pattern!r} {wrong}", 'for example "*.keras" or logs/')
        for pattern in patterns
        if (wrong := pattern_problem(pattern))
    ]
    if problems:
        raise ConfigError(problems)
    return paths, patterns


def _from_launcher(
    paths: RunPaths, launcher_host: str, wanted: Fetch, screen: Screen
) -> list[ResultsView] | None:
    """Have the launcher fetch, and wait until it has. Raises ContactLostError.

    Returns None if the run has ended before the launcher saw the request.
    """
    request = LauncherRequest(paths, wanted)
    checked_s = time.monotonic()
    hosts: list[str] | None = None
    results: dict[str, ResultsView] = {}
    while hosts is None or len(results) < len(hosts):
        for event in request.wait():
            if event.get("request") != request.number:
                continue
            if event["type"] == "fetch":
                hosts = [str(host) for host in event.get("hosts") or ()]
            elif event["type"] == "results":
                results[str(event.get("host"))] = results_view(event)
        if hosts is None:
            request.require_answer()
        now_s = time.monotonic()
        if now_s - checked_s > _CHECK_S:
            checked_s = now_s
            if _has_ended(paths) and hosts is None:
                request.withdraw()
                return None
        if hosts is not None:
            screen.live(_progress(paths, request.number))
    if launcher_host != identity().host:
        screen.say(f"the launcher runs on {launcher_host}: the files are there")
    return list(results.values())


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
    progress = read_json(paths.fetching) or {}
    hosts = progress.get("hosts")
    if progress.get("request") != number or not isinstance(hosts, dict):
        return "waiting for another fetch, or for a list of files"
    return progress_text(hosts)


def _afterwards(
    description: Description,
    paths: RunPaths,
    wanted: Fetch,
    environ: Mapping[str, str],
    screen: Screen,
) -> list[ResultsView]:
    """Fetch through new agents, once the run is over.

    Raises HostError if no host can be reached.
    """
    # These imports include the launcher, which takes longer than the rest.
    from tfcluster.launcher.late_results import fetch_late
    from tfcluster.launcher.results import event_fields

    chosen = _hosts(read_json(paths.plan) or {}, every=bool(wanted.all))
    backend, folder = schedulers.get(description.backend), str(description.workdir)
    if not backend.lists_hosts:
        there = description.sync.folder if description.sync else folder
        raise HostError(
            f"{paths.run} is over, and so is its {description.backend} job: its hosts "
            f"({fold(chosen)}) cannot be reached through the scheduler any more",
            hint=f"the files were in {there} there; if you can log in, copy them with "
            "scp or rsync",
        )
    starter = backend.starter(description, environ)
    by_name = {host.name: host for host in description.hosts}
    results = fetch_late(
        description,
        [by_name[name] for name in chosen if name in by_name],
        starter,
        wanted.patterns,
        apart=bool(wanted.all),
        force=wanted.force,
        show=lambda outcomes: screen.live(progress_text(_bytes_of(outcomes))),
    )
    errors = [error for _, error in results if error is not None]
    if errors and len(errors) == len(results):
        for error in errors[1:]:
            screen.say(error.message)
        raise errors[0]
    return [results_view(event_fields(outcome, None, folder)) for outcome, _ in results]


def _bytes_of(outcomes: Mapping[str, TransferOutcome]) -> dict[str, dict[str, int]]:
    return {
        host: {"bytes": outcome.done_bytes, "of_bytes": outcome.bytes}
        for host, outcome in outcomes.items()
    }


def _hosts(plan: Mapping[str, Any], *, every: bool) -> list[str]:
    """The hosts of all tasks, or only the host of rank 0, in the plan's order."""
    tasks = [task for task in plan.get("tasks") or () if isinstance(task, dict)]
    ranked = [task for task in tasks if task.get("rank") == 0]
    chosen = tasks if every else (ranked or tasks[:1])
    return list(dict.fromkeys(str(task.get("host")) for task in chosen))
