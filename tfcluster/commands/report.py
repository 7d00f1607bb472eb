"""The command ``report``: one HTML file about a run."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tfcluster.commands.record_query import one_run
from tfcluster.console.output import put, say
from tfcluster.console.sanitise import sanitise
from tfcluster.errors import ConfigError, ExitCode, Problem, ResourceError
from tfcluster.record.events import read_events
from tfcluster.record.files import read_json
from tfcluster.record.metrics import read_metrics
from tfcluster.record.paths import find, state_dir

_STDOUT = "-"
_DRAWS = "matplotlib"


def report(run: str | None, environ: Mapping[str, str], *, file: str | None) -> int:
    """Write the report of a run and print its path. Raises TfclusterError."""
    name = find(state_dir(environ), run).run
    if file == _STDOUT:
        put(html(name, environ))
        return ExitCode.OK
    path = write_report(name, Path(file or default_name(name)), environ)
    put(f"{path}\n")
    say(sanitise(f"{name}: open it in a browser"))
    return ExitCode.OK


def default_name(run: str) -> str:
    """The name of the report's file unless the user gives another one."""
    return f"{run}-report.html"


def write_report(run: str, path: Path, environ: Mapping[str, str]) -> Path:
    """Write the report of a run to a file; returns its path.

    Raises ConfigError without a run or matplotlib, or ResourceError if it cannot write.
    """
    if not path.parent.is_dir():  # checked before anything is drawn
        raise _unwritable(path, f"there is no folder {path.parent}")
    if path.is_dir():
        raise _unwritable(path, "it is a folder")
    text = html(run, environ)
    try:
        _replace(path, text)
    except OSError as error:
        raise _unwritable(path, str(error.strerror)) from error
    return path


def html(run: str | None, environ: Mapping[str, str]) -> str:
    """The report of a run as HTML. Raises ConfigError without a run or matplotlib."""
    if importlib.util.find_spec(_DRAWS) is None:
        raise ConfigError(
            [
                Problem(
                    "tfcluster report",
                    f"it draws with {_DRAWS}, which {sys.executable} does not have",
                    "pip install 'tfcluster[report]'",
                )
            ]
        )
    # These modules import matplotlib.
    from tfcluster.report.history import history
    from tfcluster.report.page import page

    view = one_run(run, environ)
    paths = find(state_dir(environ), view.run)
    settings = (read_json(paths.launched) or {}).get("description")
    return page(
        history(
            view,
            read_events(paths.events),
            read_metrics(paths),
            settings if isinstance(settings, dict) else None,
            time.time(),
        )
    )


def _unwritable(path: Path, why: str) -> ResourceError:
    return ResourceError(f"cannot write {path}: {why}", hint="name another file")


def _replace(path: Path, text: str) -> None:
    """Replace the file atomically: a browser may be reading the old one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
