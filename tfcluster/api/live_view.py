"""Shows a run as it changes: in the output of a notebook's cell, or on a screen."""

from __future__ import annotations

import html
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tfcluster.console.screen import Screen
from tfcluster.console.views.progress import live_text
from tfcluster.console.views.status import status
from tfcluster.record.run_status import RunView

_CLOSE_S = 5.0


@contextmanager
def live_view() -> Iterator[Callable[[RunView], None]]:
    """A function that shows the state of a run in place of the previous state."""
    # A kernel of IPython can redraw the output of a cell.
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None and hasattr(shell, "kernel"):
        yield _Notebook().show
        return
    screen = Screen(None, sys.stdout, environ=os.environ)

    def show(view: RunView) -> None:
        if not view.state.final:
            screen.live(live_text(view, time.time()))
            return
        screen.live(None)
        screen.show(status(view, time.time(), screen.style))

    try:
        yield show
    finally:
        screen.close(_CLOSE_S)


class _Notebook:
    """One output of a cell, which is redrawn."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, view: RunView) -> None:
        text = "\n".join(status(view, time.time()))
        shown = {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}
        if self._handle is not None:
            self._handle.update(shown, raw=True)
            return
        # Not an import statement: the notebook has already loaded IPython.
        display = importlib.import_module("IPython.display").display
        self._handle = display(shown, raw=True, display_id=True)
