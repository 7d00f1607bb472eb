"""The commands ``status``, ``logs``, ``list`` and ``stop``."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tfcluster.base.errors import ExitCode
from tfcluster.base.vocabulary import FORMAT_VERSION
from tfcluster.commands.record_query import (
    all_runs_json,
    continuation_text,
    follow_logs,
    log_files,
    other_runs,
    read_logs,
    split_words,
    view_reader,
)
from tfcluster.console.display import is_debugging, is_terminal, style_of
from tfcluster.console.line_folding import Echo, LineFolding, Shown
from tfcluster.console.output import put, say
from tfcluster.console.sanitise import sanitise, settle
from tfcluster.console.views.status import run_list, status_line
from tfcluster.console.views.status import status as status_view
from tfcluster.record.load_run import gpus_of_tasks, read_summary
from tfcluster.record.paths import RunPaths, runs, state_dir
from tfcluster.record.run_status import RunView, iso_time

if TYPE_CHECKING:
    from tfcluster.documents import run as documents

_WATCH_S = 1.0
_CLEAR = "\x1b[H\x1b[J"


def status(
    run: str | None, environ: Mapping[str, str], *, as_json: bool, watch: bool
) -> int:
    """Print the state of a run; with ``watch``, repeatedly until it is over."""
    if as_json and run is None and not watch:
        return _put(json.dumps(all_runs_json(environ), indent=1))
    read = view_reader(run, environ)
    while True:
        view = read()
        if as_json:
            _put(json.dumps(view.to_json(), indent=None if watch else 1))
        else:
            _put(_text(view, environ, others=run is None and not watch, clear=watch))
        if not watch or view.state.final:
            return 0
        time.sleep(_WATCH_S)


def _text(
    view: RunView, environ: Mapping[str, str], *, others: bool, clear: bool
) -> str:
    style = style_of(sys.stdout, environ)
    lines = status_view(view, time.time(), style)
    if others and (rest := other_runs(environ)):
        lines += ["", *(status_line(other, time.time(), style) for other in rest)]
    top = _CLEAR if clear and is_terminal(sys.stdout, environ) else ""
    return top + "\n".join(lines)


def logs(
    words: Sequence[str],
    environ: Mapping[str, str],
    *,
    follow: bool,
    count: int,
    everything: bool,
) -> int:
    """Print the tasks' last lines as ``launch`` shows them, or ``everything``."""
    run, tasks = split_words(words)
    paths, files = log_files(run, tasks, environ)
    everything = everything or is_debugging(environ)
    echo = Echo(gpus_of_tasks(paths), everything=everything)
    folds = is_terminal(sys.stdout, environ) and not everything
    folding = LineFolding(files if folds else ())
    style = style_of(sys.stdout, environ, files)

    def show(chosen: Sequence[Shown]) -> None:
        for batch in chosen:
            prefix = style.prefix(batch.task, batch.also) if len(files) > 1 else ""
            lines = [sanitise(settle(line)) for line in batch.lines]
            put("".join(f"{prefix}{line}\n" for line in lines))

    if follow:
        batches = follow_logs(
            paths, files, count, lambda: show(folding.due(time.monotonic()))
        )
    else:
        # What the first rank prints is compared with what the others have printed.
        ordered = sorted(files, key=lambda task: task == folding.first)
        batches = read_logs({task: files[task] for task in ordered}, count)
    for task, lines in batches:
        show(folding.add(task, echo.chosen(task, lines), time.monotonic()))
    show(folding.rest())
    if note := continuation_text(paths):
        _say(note)
    return 0


def stop(run: str | None, environ: Mapping[str, str], *, now: bool) -> int:
    """End a run; returns 0 once nothing of it is left."""
    from tfcluster.commands.stop import stop as stop_run

    stop_run(run, now=now, environ=environ, say=_say)
    return ExitCode.OK


def _say(text: str) -> None:
    say(sanitise(text))


def _put(text: str) -> int:
    put(f"{text}{os.linesep}")
    return 0


def list_runs(environ: Mapping[str, str], *, limit: int | None, as_json: bool) -> int:
    """Print the ``limit`` newest runs, newest first; all runs if it is None."""
    all_runs, now_s = runs(state_dir(environ)), time.time()
    shown = all_runs[:limit]
    views = [read_summary(paths, now_s=now_s) for paths in shown]
    if as_json:
        rows = [_row(*pair) for pair in zip(shown, views, strict=True)]
        answer: documents.RunList = {"schema": FORMAT_VERSION, "runs": rows}
        return _put(json.dumps(answer, indent=1))
    lines = run_list(views, now_s, style_of(sys.stdout, environ))
    put("".join(f"{line}\n" for line in lines))
    if not all_runs:
        say("no runs yet: `tfcluster launch` starts one")
    elif len(all_runs) > len(shown):
        more = len(all_runs) - len(shown)
        say(f"and {more:,} older; --limit {len(all_runs)} shows all")
    return 0


def _row(paths: RunPaths, view: RunView) -> documents.ListedRun:
    return {
        "run": view.run,
        "name": view.name,
        "backend": view.backend,
        "state": view.state.value,
        "exit_code": view.exit_code,
        "started": iso_time(view.started_s),
        "ended": iso_time(view.ended_s),
        "reason": view.reason,
        "folder": str(paths.root),
    }
