"""The command ``stacks``: show where running tasks are in their Python code."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfcluster.commands.launcher_request import LauncherRequest
from tfcluster.commands.record_query import log_files, split_words
from tfcluster.console.output import put, say
from tfcluster.console.sanitise import sanitise, sanitise_word
from tfcluster.console.text import fold_tasks
from tfcluster.errors import ConfigError, ExitCode, Problem
from tfcluster.protocol.commands import Stacks
from tfcluster.record.events import Event
from tfcluster.record.load_run import read_run
from tfcluster.record.paths import RunPaths
from tfcluster.vocabulary import FORMAT_VERSION

if TYPE_CHECKING:
    from tfcluster.documents import run as documents
ANSWERS_S = 3.0
"""How long tasks may take to answer."""


def stacks(words: Sequence[str], environ: Mapping[str, str], *, as_json: bool) -> int:
    """Print the stacks of a run's running tasks. Raises TfclusterError.

    ``words`` is ``[RUN] [TASK...]``.
    """
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
        found: list[documents.TaskStack] = [
            {
                "task": task,
                "stack": answers[task].get("text"),
                "waiting": answers[task].get("waiting"),
            }
            for task in asked
            if task in answers
        ]
        given: documents.StackReport = {
            "schema": FORMAT_VERSION,
            "run": paths.run,
            "tasks": found,
            "silent": silent,
        }
        put(json.dumps(given, indent=1) + "\n")
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
    """The tasks that were asked, in listing order, and the answers by task."""
    request = LauncherRequest(paths, Stacks(tuple(tasks)))
    until_s = 0.0
    asked: list[str] | None = None
    answers: dict[str, Event] = {}
    while asked is None or time.monotonic() < until_s:
        for event in request.wait():
            if event["type"] == "asked" and event.get("request") == request.number:
                known = event.get("tasks") or []
                asked = [task for task in tasks if task in known]
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
