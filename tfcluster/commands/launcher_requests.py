"""The commands ``resize`` and ``stacks``, which the launcher of a run carries out.

A command leaves a request for the launcher, which answers in the record.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfcluster.base.errors import ConfigError, ContactLostError, ExitCode, Problem
from tfcluster.base.states import RunState
from tfcluster.base.vocabulary import FORMAT_VERSION
from tfcluster.commands.record_query import log_files, split_words
from tfcluster.console.output import put, say
from tfcluster.console.sanitise import sanitise, sanitise_word
from tfcluster.console.text import fold_tasks
from tfcluster.plan.host_patterns import HostlistError, expand, host_name_problem
from tfcluster.protocol.commands import Command, NewHost, ResizeCommand, StacksCommand
from tfcluster.record.events import Event, EventReader
from tfcluster.record.load_run import read_run
from tfcluster.record.paths import RunPaths, find, state_dir
from tfcluster.record.requests import ask, withdraw

if TYPE_CHECKING:
    from tfcluster.documents import run as documents

ASKED_S = 15.0
"""How long the launcher may take to see the request; the folder may be on NFS."""
_POLL_S = 0.05


class LauncherRequest:
    def __init__(self, paths: RunPaths, request: Command) -> None:
        self._paths = paths
        self._events = EventReader(paths.events)
        self._events.read()  # earlier ones
        self.number = ask(paths, request)
        self._until_s = time.monotonic() + ASKED_S

    def wait(self) -> list[Event]:
        time.sleep(_POLL_S)  # another process writes them
        return self._events.read()

    def require_answer(self) -> None:
        """Raise ContactLostError if the launcher should have answered by now."""
        if time.monotonic() > self._until_s:
            self.withdraw()
            run = self._paths.run
            raise ContactLostError(
                f"the launcher of {run} does not answer",
                hint=f"`tfcluster status {run}` tells whether it is alive",
            )

    def withdraw(self) -> None:
        withdraw(self._paths, self.number)


_CHANGES = "worker=8, hosts+=node9 or hosts+=node[9-12]:4"
_WORKERS = re.compile(r"worker=([0-9]{1,6})")
_SLOTS = re.compile(r"(.+):([0-9]{1,6})")


def resize(words: Sequence[str], environ: Mapping[str, str], *, now: bool) -> int:
    """Ask the launcher to resize; ``words``: ``[RUN] CHANGE...``."""
    run, request = resize_request(words, now=now)
    paths = find(state_dir(environ), run)
    view = read_run(paths, now_s=time.time())
    if view.state is not RunState.RUNNING or view.launcher is None:
        hint = "only a run whose tasks all run can be resized"
        raise ConfigError([Problem(paths.run, f"it is {view.state}", hint)])
    answer = _ask(paths, request)
    if problems := answer.get("problems"):
        raise ConfigError([Problem(paths.run, str(problem)) for problem in problems])
    before, after = answer.get("before"), answer.get("workers")
    say(sanitise(f"{paths.run} is resized from {before} to {after} workers"))
    if hosts := answer.get("hosts"):
        names = ", ".join(map(str, hosts))
        say(sanitise(f"{names}: made ready while the other hosts train"))
    say(f"`tfcluster status {paths.run}` shows when its tasks restart")
    return ExitCode.OK


def resize_request(
    words: Sequence[str], *, now: bool
) -> tuple[str | None, ResizeCommand]:
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
                problems.append(Problem(word, "is not a number of workers", _CHANGES))
            elif workers is not None:
                problems.append(Problem(word, "'worker' is given twice"))
            else:
                workers = int(match[1])
        elif key == "hosts+":
            hosts += _hosts(word, value, problems)
        elif key in ("ps", "chief", "evaluator", "data"):
            problems.append(Problem(word, f"{key} tasks cannot be resized", _CHANGES))
        else:
            problems.append(Problem(word, "is not a change", _CHANGES))
    if not changes:
        problems.append(Problem("resize", "nothing to change", _CHANGES))
    if problems:
        raise ConfigError(problems)
    return run, ResizeCommand(workers, tuple(hosts), now)


def _hosts(word: str, value: str, problems: list[Problem]) -> list[NewHost]:
    match = _SLOTS.fullmatch(value)
    pattern, slots = (match[1], int(match[2])) if match else (value, None)
    try:
        names = expand(pattern)
    except HostlistError as error:
        problems.append(Problem(word, error.message, _CHANGES))
        return []
    for name in names:
        if problem := host_name_problem(name):
            problems.append(Problem(word, f"{name[:60]!r} {problem}", _CHANGES))
            return []
    return [NewHost(name, slots) for name in names]


def _ask(paths: RunPaths, request: ResizeCommand) -> Event:
    asked = LauncherRequest(paths, request)
    while True:
        for event in asked.wait():
            if event["type"] == "resize" and event.get("request") == asked.number:
                return event
        asked.require_answer()


ANSWERS_S = 3.0
"""How long tasks may take to answer."""


def stacks(words: Sequence[str], environ: Mapping[str, str], *, as_json: bool) -> int:
    """Print the stacks of tasks; ``words``: ``[RUN] [TASK...]``."""
    run, tasks = split_words(words)
    paths, files = log_files(run, tasks, environ)
    view = read_run(paths, now_s=time.time())
    if view.state.final or view.launcher is None:
        why = f"it is {view.state}" if view.state.final else "it has not started yet"
        hint = "only running tasks have stacks"
        raise ConfigError([Problem(paths.run, f"{why}: there are no stacks", hint)])
    asked, answers = _collect(paths, list(files))
    silent = [task for task in asked if task not in answers]
    if as_json:
        report: documents.StackReport = {
            "schema": FORMAT_VERSION,
            "run": paths.run,
            "tasks": [
                {
                    "task": task,
                    "stack": answers[task].get("text"),
                    "waiting": answers[task].get("waiting"),
                }
                for task in asked
                if task in answers
            ],
            "silent": silent,
        }
        put(json.dumps(report, indent=1) + "\n")
        return ExitCode.OK
    for task in asked:
        if task in answers:
            put(_shown(task, answers[task]))
    if not asked:
        say("no task is running")
    if silent:
        say(
            f"{fold_tasks(silent)} did not answer: not a Python program under the "
            "training runtime, stopped, stuck outside Python, or TensorFlow not "
            "imported yet"
        )
    return ExitCode.OK


def _collect(paths: RunPaths, tasks: list[str]) -> tuple[list[str], dict[str, Event]]:
    request = LauncherRequest(paths, StacksCommand(tuple(tasks)))
    until_s = 0.0
    asked: list[str] | None = None
    answers: dict[str, Event] = {}
    while asked is None or time.monotonic() < until_s:
        for event in request.wait():
            if event["type"] == "asked" and event.get("request") == request.number:
                running = event.get("tasks") or []
                asked = [task for task in tasks if task in running]
                until_s = time.monotonic() + ANSWERS_S
            elif event["type"] == "stack" and asked is not None:
                answers[str(event.get("task"))] = event
        if asked is None:
            request.require_answer()
        elif all(task in answers for task in asked):
            break
    return asked, answers


def _shown(task: str, answer: Mapping[str, Any]) -> str:
    head = sanitise_word(task)
    waiting = answer.get("waiting")
    if isinstance(waiting, dict):
        ranks = ", ".join(str(rank) for rank in waiting.get("for") or ())
        whom = f" for rank {ranks}" if ranks else ""
        what = sanitise_word(str(waiting.get("what") or ""))
        head += f"  (waits{whom}{f' in {what}' if what else ''})"
    lines = str(answer.get("text") or "").splitlines()
    return "".join(f"{line}\n" for line in (head, *(f"  {sanitise(t)}" for t in lines)))
