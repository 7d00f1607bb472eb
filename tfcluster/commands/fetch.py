"""The command ``fetch``: get what tasks have written on hosts that share no files."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tfcluster import schedulers
from tfcluster.base.errors import (
    ConfigError,
    ContactLostError,
    ExitCode,
    HostError,
    Problem,
    TfclusterError,
)
from tfcluster.base.states import RunState
from tfcluster.base.vocabulary import FORMAT_VERSION
from tfcluster.commands.launcher_requests import LauncherRequest
from tfcluster.console.output import put, say
from tfcluster.console.sanitise import sanitise
from tfcluster.console.screen import Screen
from tfcluster.console.views.status import progress_text, result_lines
from tfcluster.launcher.agent_connection import Closed, Received, Unopened
from tfcluster.launcher.brief_contacts import BriefContacts, Item
from tfcluster.launcher.result_placement import ResultFolder
from tfcluster.launcher.result_transfer import (
    HostTransfer,
    Inbox,
    TransferOutcome,
    WantedFiles,
    run_all,
)
from tfcluster.launcher.results import AT_ONCE
from tfcluster.launcher.workdir_listing import witnesses
from tfcluster.plan.host_patterns import fold
from tfcluster.plan.model import Description, Host, pattern_problem
from tfcluster.protocol.commands import Fetch
from tfcluster.protocol.messages import Fault, ResultsMessage
from tfcluster.record.files import read_json
from tfcluster.record.launched import resized
from tfcluster.record.liveness import identity
from tfcluster.record.load_run import read_run
from tfcluster.record.paths import RunPaths, find, state_dir
from tfcluster.record.replay import results_view
from tfcluster.record.run_status import ResultsView, RunView
from tfcluster.schedulers.starting import Starter

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
    """Fetch files; ``words``: ``[RUN] [PATTERN...]``; 1 if some were not fetched."""
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
    """Have the launcher fetch; None: the run ended first. Raises ContactLostError."""
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
    """Fetch through new agents, once the run is over. Raises HostError."""
    # These imports include the launcher, which takes longer than the rest.
    from tfcluster.commands.fetch import fetch_late
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
    tasks = [task for task in plan.get("tasks") or () if isinstance(task, dict)]
    ranked = [task for task in tasks if task.get("rank") == 0]
    chosen = tasks if every else (ranked or tasks[:1])
    return list(dict.fromkeys(str(task.get("host")) for task in chosen))


_SHOW_S = 0.1


def fetch_late(
    description: Description,
    hosts: Sequence[Host],
    starter: Starter,
    patterns: tuple[str, ...],
    *,
    apart: bool,
    force: bool,
    show: Callable[[Mapping[str, TransferOutcome]], None],
) -> list[tuple[TransferOutcome, TfclusterError | None]]:
    """Fetch from hosts whose run is over; an error says why a host was not reached."""
    root, sync = description.workdir, description.sync
    folder = str(root) if sync is None else sync.folder
    wanted = WantedFiles(folder, witnesses(root), patterns)
    outcomes = {host.name: TransferOutcome(host.name) for host in hosts}
    inboxes = {host.name: Inbox() for host in hosts}
    # The agents are not of the run: they must not end any of its processes that are
    # left.
    contacts = BriefContacts(starter, "fetch")
    try:
        errors = _open(contacts, hosts, inboxes)
        transfers = [
            HostTransfer(
                outcomes[name],
                wanted,
                ResultFolder(root, name, force=force, apart=apart),
                send=partial(contacts.send, name),
                inbox=inboxes[name],
            )
            for name in outcomes
            if errors[name] is None
        ]
        act = partial(run_all, transfers, AT_ONCE)
        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        shown_s = 0.0
        while thread.is_alive():
            _handle(contacts.next(_SHOW_S), inboxes, errors)
            if time.monotonic() - shown_s >= _SHOW_S:
                show(outcomes)
                shown_s = time.monotonic()
    finally:
        contacts.close()
    for name, error in errors.items():
        if error is not None:
            outcomes[name].cause, outcomes[name].over = error.message, True
    return [(outcome, errors[name]) for name, outcome in outcomes.items()]


def _open(
    contacts: BriefContacts, hosts: Sequence[Host], inboxes: Mapping[str, Inbox]
) -> dict[str, TfclusterError | None]:
    """Start agents on hosts; returns why this failed, and None where it did not."""
    errors: dict[str, TfclusterError | None] = {}
    contacts.open(hosts)
    while len(errors) < len(hosts):
        _handle(contacts.next(_SHOW_S), inboxes, errors)
    return errors


def _handle(
    item: Item | None,
    inboxes: Mapping[str, Inbox],
    errors: dict[str, TfclusterError | None],
) -> None:
    if isinstance(item, Closed):
        inboxes[item.host].end(item.cause)
    elif isinstance(item, Received):
        if isinstance(item.message, ResultsMessage):
            inboxes[item.host].put(item.message)
        elif isinstance(item.message, Fault):
            inboxes[item.host].end(item.message.cause)
    elif isinstance(item, Unopened):
        errors[item.host] = item.error
    elif item is not None:
        errors[item.host] = None
