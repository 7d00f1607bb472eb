"""The commands ``report`` and ``trace``, each of which writes a file about a run."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tfcluster.base.errors import ConfigError, ExitCode, Problem, ResourceError
from tfcluster.base.task_id import TaskId
from tfcluster.commands.record_query import one_run
from tfcluster.console.output import put, say
from tfcluster.console.sanitise import sanitise
from tfcluster.record.events import read_events
from tfcluster.record.files import read_json
from tfcluster.record.launched import launched
from tfcluster.record.load_run import read_run
from tfcluster.record.metrics import read_metrics
from tfcluster.record.paths import RunPaths, find, state_dir
from tfcluster.record.run_status import RunView
from tfcluster.trace.spans import (
    Events,
    HostClock,
    Process,
    host_clocks,
    host_items,
    launcher_items,
    pieces,
    recorded,
    task_items,
)

_STDOUT = "-"
_DRAWS = "matplotlib"


def report(run: str | None, environ: Mapping[str, str], *, output: str | None) -> int:
    """Write the report of a run and print its path. Raises TfclusterError."""
    name = find(state_dir(environ), run).run
    if output == _STDOUT:
        put(html(name, environ))
        return ExitCode.OK
    path = write_report(name, Path(output or default_name(name)), environ)
    put(f"{path}\n")
    say(sanitise(f"{name}: open it in a browser"))
    return ExitCode.OK


def default_name(run: str) -> str:
    """The name of the report's file unless the user gives another one."""
    return f"{run}-report.html"


def write_report(run: str, path: Path, environ: Mapping[str, str]) -> Path:
    """Write the report of a run to a file. Raises ConfigError or ResourceError."""
    if not path.parent.is_dir():  # checked before anything is drawn
        raise _unwritable(path, f"there is no folder {path.parent}")
    if path.is_dir():
        raise _unwritable(path, "it is a folder")
    _write(path, [html(run, environ)])
    return path


def html(run: str | None, environ: Mapping[str, str]) -> str:
    """The report of a run as HTML. Raises ConfigError without a run or matplotlib."""
    if importlib.util.find_spec(_DRAWS) is None:
        problem = f"it draws with {_DRAWS}, which {sys.executable} does not have"
        hint = "pip install 'tfcluster[report]'"
        raise ConfigError([Problem("tfcluster report", problem, hint)])
    # These modules import matplotlib.
    from tfcluster.report.history import History
    from tfcluster.report.page import page

    view = one_run(run, environ)
    paths = find(state_dir(environ), view.run)
    settings = (read_json(paths.launched) or {}).get("description")
    return page(
        History(
            view,
            time.time(),
            read_events(paths.events),
            read_metrics(paths),
            settings if isinstance(settings, dict) else None,
        )
    )


def _unwritable(path: Path, why: str) -> ResourceError:
    return ResourceError(f"cannot write {path}: {why}", hint="name another file")


def _write(path: Path, parts: Iterable[str]) -> None:
    try:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(parts)
    except OSError as error:
        raise _unwritable(path, str(error.strerror)) from error


_SCHEMA = 1
_NOT_TRACED = (
    "its tasks have recorded no steps: `tfcluster launch --trace`, or runtime: "
    "{trace: true}, shows steps and exchanges"
)
_NOTHING_YET = (
    "its tasks have recorded nothing: they have not trained yet, or train without "
    "tfcluster (strategy: none, or TensorFlow 1)"
)


def trace(run: str | None, environ: Mapping[str, str], *, output: str | None) -> int:
    """Write the trace to a file, or to standard output for ``-``."""
    paths = find(state_dir(environ), run)
    events = read_events(paths.events)
    view = read_run(paths, now_s=time.time())
    text = _text(paths, view, events)
    if not any(_lines(paths, task.task) for task in view.tasks):
        say(f"{paths.run}: {_NOTHING_YET if _is_traced(paths) else _NOT_TRACED}")
    if output == _STDOUT:
        for piece in text:
            put(piece)
        return ExitCode.OK
    file = Path(output or f"{paths.run}-trace.json")
    _write(file, text)
    put(f"{sanitise(os.fspath(file))}\n")
    say("open it in https://ui.perfetto.dev or chrome://tracing")
    return ExitCode.OK


def _is_traced(paths: RunPaths) -> bool:
    """Whether the run was launched to record steps, as far as its record shows."""
    try:
        return launched(paths).runtime.trace
    except ConfigError:
        return False


def _text(paths: RunPaths, view: RunView, events: Events) -> Iterator[str]:
    running = not view.state.final
    latest_s = time.time() if running else max((e["t"] for e in events), default=0.0)
    clocks = host_clocks(events)
    first_s = min((event["t"] for event in events), default=latest_s)
    start_s = min(first_s, view.started_s or first_s)
    facts = {
        "schema": _SCHEMA,
        "run": paths.run,
        "state": str(view.state),
        "started": start_s,
        "clock_uncertainty_ms": {
            host: round(clock.uncertainty_s * 1000, 3) for host, clock in clocks.items()
        },
    }
    processes = _processes(paths, view, events, clocks, int(latest_s * 1e6))
    return pieces(processes, int(start_s * 1e6), facts)


def _processes(
    paths: RunPaths,
    view: RunView,
    events: Events,
    clocks: dict[str, HostClock],
    now_us: int,
) -> Iterator[Process]:
    here = f" on {view.launcher.host}" if view.launcher else ""
    yield Process(f"launcher{here}", tuple(launcher_items(events, now_us)))
    for host in view.hosts:
        items = tuple(host_items(events, host.host, now_us))
        clock = clocks.get(host.host)
        label = f"clock ±{clock.uncertainty_s * 1000:.2g} ms" if clock else ""
        yield Process(f"host {host.host}", items, label)
    for task in view.tasks:
        steps = recorded(_lines(paths, task.task), clocks)
        items = (*task_items(events, task.task, now_us), *steps)
        yield Process(f"{task.task} on {task.host}", items)


def _lines(paths: RunPaths, task: str) -> list[bytes]:
    """The complete lines of a task's recordings, oldest first."""
    lines: list[bytes] = []
    task_id = TaskId.parse(task)
    for path in (paths.older_trace(task_id), paths.trace(task_id)):
        with contextlib.suppress(OSError):
            data = path.read_bytes()
            lines += data[: data.rfind(b"\n") + 1].splitlines()
    return lines
