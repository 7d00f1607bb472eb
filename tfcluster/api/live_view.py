"""Shows a run as it changes: in a notebook, in a terminal, or as plain lines."""

from __future__ import annotations

import html
import importlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from tfcluster.base.states import RunState
from tfcluster.console.display import CLEAR, is_terminal
from tfcluster.console.text import fold_tasks
from tfcluster.console.views.status import status, status_line
from tfcluster.record.run_status import RunView


def live_view() -> Callable[[RunView], None]:
    """A function that shows the state of a run in place of the previous state."""
    # A kernel of IPython can redraw the output of a cell.
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None and hasattr(shell, "kernel"):
        return _Notebook().show
    if is_terminal(sys.stdout, os.environ):
        return lambda view: _print(CLEAR + _text(view))
    return _Lines().show


class _Notebook:
    """One output of a cell, which is redrawn."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, view: RunView) -> None:
        text = _text(view)
        shown = {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}
        if self._handle is not None:
            self._handle.update(shown, raw=True)
            return
        # Not an import statement: the notebook has already loaded IPython.
        display = importlib.import_module("IPython.display").display
        self._handle = display(shown, raw=True, display_id=True)


class _Lines:
    """Prints a line whenever the state of the run or of a task has changed."""

    def __init__(self) -> None:
        self._last = ""

    def show(self, view: RunView) -> None:
        if view.state.final:
            _print(_text(view))
            return
        line = status_line(view, time.time())
        if view.state is not RunState.STARTING:
            tasks: dict[str, list[str]] = {}
            for task in view.tasks:
                tasks.setdefault(task.phase or str(task.state), []).append(task.task)
            doing = (f"{fold_tasks(names)} {what}" for what, names in tasks.items())
            line = f"{line}  {', '.join(doing)}"
        if line != self._last:
            self._last = line
            _print(line)


def _text(view: RunView) -> str:
    return "\n".join(status(view, time.time()))


def _print(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the caller's output
