"""Shows a run as it changes: in a notebook, in a terminal, or as plain lines."""

from __future__ import annotations

import html
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tfcluster.base.states import RunState
from tfcluster.console.text import fold_tasks
from tfcluster.console.views.status import status, status_line
from tfcluster.record.run_status import RunView

Show = Callable[[RunView], None]


@contextmanager
def live_view() -> Iterator[Show]:
    """A function that shows the state of a run in place of the previous state."""
    if in_notebook():
        yield _notebook()
    elif sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        with _rich() as show:
            yield show
    else:
        yield _Lines().show


def in_notebook() -> bool:
    """Whether an IPython kernel runs us, so that output can be redrawn."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def _notebook() -> Show:
    # Not an import statement: the notebook has already loaded IPython.
    display = importlib.import_module("IPython.display").display
    handle: Any = None

    def show(view: RunView) -> None:
        nonlocal handle
        text = _text(view)
        shown = {
            "text/plain": text,
            "text/html": f"<pre>{html.escape(text)}</pre>",
        }
        if handle is None:
            handle = display(shown, raw=True, display_id=True)
        else:
            handle.update(shown, raw=True)

    return show


@contextmanager
def _rich() -> Iterator[Show]:
    live_class = importlib.import_module("rich.live").Live
    text_class = importlib.import_module("rich.text").Text
    with live_class(auto_refresh=False) as live:
        yield lambda view: live.update(text_class(_text(view)), refresh=True)


class _Lines:
    """Prints a line whenever the state of the run or of a task has changed."""

    def __init__(self) -> None:
        self._last = ""

    def show(self, view: RunView) -> None:
        if view.state.final:
            print(_text(view), flush=True)  # noqa: T201 - the caller's output
            return
        line = status_line(view, time.time())
        if view.state is not RunState.STARTING:
            tasks: dict[str, list[str]] = {}
            for task in view.tasks:
                word = task.phase or str(task.state)
                tasks.setdefault(word, []).append(task.task)
            words = (f"{fold_tasks(names)} {word}" for word, names in tasks.items())
            line = f"{line}  {', '.join(words)}"
        if line != self._last:
            self._last = line
            print(line, flush=True)  # noqa: T201 - the caller's output


def _text(view: RunView) -> str:
    return "\n".join(status(view, time.time()))
