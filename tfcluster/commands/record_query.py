"""Reads the record for ``status`` and ``logs``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tfcluster.base.errors import ConfigError, Problem
from tfcluster.base.task_id import TaskId
from tfcluster.base.vocabulary import FORMAT_VERSION, TASK_TYPES
from tfcluster.record.continuation import successor, was_requeued
from tfcluster.record.files import read_json
from tfcluster.record.load_run import RunReader, read_run, read_summary
from tfcluster.record.logs import follow, last_lines
from tfcluster.record.paths import RunPaths, find, runs, state_dir
from tfcluster.record.run_status import RunView

if TYPE_CHECKING:
    from tfcluster.documents import run as documents

SHOWN_RUNS = 5
_READ_RUNS = 200
"""Older runs are not read to find out whether they are active."""


def one_run(run: str | None, environ: Mapping[str, str]) -> RunView:
    return view_reader(run, environ)()


def view_reader(run: str | None, environ: Mapping[str, str]) -> Callable[[], RunView]:
    """Like ``one_run``, for many calls, each of which reads only what is new."""
    paths = find(state_dir(environ), run)
    reader = RunReader(paths)

    def read() -> RunView:
        view = reader.read(now_s=time.time())
        if not (view.only_a_scheduler_knows or view.awaits_another_start):
            return view
        # This includes the launcher, and takes longer than the rest of ``status``.
        from tfcluster.submit.job_status import with_job_state

        return with_job_state(view, paths, environ)

    return read


def other_runs(environ: Mapping[str, str]) -> list[RunView]:
    """Active runs and the last SHOWN_RUNS, without the newest one; newest first."""
    older = runs(state_dir(environ))[1 : _READ_RUNS + 1]
    views = [read_summary(paths, now_s=time.time()) for paths in older]
    return [
        view
        for place, view in enumerate(views)
        if place < SHOWN_RUNS
        or not (view.state.final or view.unknown_since_s is not None)
    ]


def all_runs_json(environ: Mapping[str, str]) -> documents.StatusOfAll:
    now_s = time.time()
    views = [read_run(paths, now_s=now_s) for paths in runs(state_dir(environ))]
    return {"schema": FORMAT_VERSION, "runs": [view.to_json() for view in views]}


def split_words(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split ``[RUN] [TASK...]``: the first word is the run unless it names tasks."""
    if words and words[0].partition(":")[0] not in TASK_TYPES:
        return words[0], list(words[1:])
    return None, list(words)


def log_files(
    run: str | None, tasks: Sequence[str], environ: Mapping[str, str]
) -> tuple[RunPaths, dict[str, Path]]:
    """The log files of these tasks, or of all, by task. Raises ConfigError."""
    paths = find(state_dir(environ), run)
    plan = read_json(paths.plan) or {}
    all_tasks = [TaskId.parse(entry["task"]) for entry in plan.get("tasks", ())]
    hint = "it has " + ", ".join(map(str, all_tasks[:12]))
    problems = [
        Problem(word, f"{paths.run} has no such task", hint)
        for word in tasks
        if not any(word in (task.type, str(task)) for task in all_tasks)
    ]
    if problems:
        raise ConfigError(problems)
    return paths, {
        str(task): paths.log(task)
        for task in all_tasks
        if not tasks or task.type in tasks or str(task) in tasks
    }


def continuation_text(paths: RunPaths) -> str | None:
    """One sentence if the run has ended but its job continues; otherwise None."""
    if (after := successor(paths)) is not None:
        return f"{paths.run} continued as {after.run}"
    if not was_requeued(paths):
        return None
    return (
        f"{paths.run} was requeued after the time limit; `tfcluster attach "
        f"{paths.run}` follows it"
    )


def read_logs(files: Mapping[str, Path], count: int) -> Iterator[tuple[str, list[str]]]:
    """The last lines of each file; [] for a task without output."""
    for task, path in files.items():
        try:
            yield task, last_lines(path, count)
        except FileNotFoundError:
            yield task, []


def follow_logs(
    paths: RunPaths,
    files: Mapping[str, Path],
    count: int | None,
    on_wait: Callable[[], None] = lambda: None,
) -> Iterator[tuple[str, list[str]]]:
    """Lines as they are written, until the run is over; calls ``on_wait`` between."""
    return follow(files, _OverOf(paths, on_wait), last=count)


class _OverOf:
    """Like an Event that is set as soon as a run is over."""

    def __init__(self, paths: RunPaths, on_wait: Callable[[], None]) -> None:
        self._paths = paths
        self._on_wait = on_wait
        self._never = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self._never.wait(timeout)
        self._on_wait()
        return read_summary(self._paths, now_s=time.time()).state.final
