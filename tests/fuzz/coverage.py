"""Which lines of some modules an input reaches, and by which way.

By sys.settrace, only for the modules in question; Python 3.10 has nothing faster.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, ModuleType
from typing import Any

Arc = tuple[int, int, int]
"""A code object's number, and the lines before and after a step within it."""


class Coverage:
    """What has been reached so far; ``arcs`` are those of the last traced input."""

    def __init__(self, modules: Iterable[ModuleType]) -> None:
        self._files = {module.__file__ for module in modules}
        self._numbers: dict[CodeType, int] = {}
        self.arcs: set[Arc] = set()

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Record the arcs of the body, and of threads that begin meanwhile."""
        self.arcs = set()
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if code.co_filename not in self._files:
            return None
        number = self._numbers.setdefault(code, len(self._numbers))
        arcs, before = self.arcs, 0

        def step(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal before
            if event == "line":
                line = frame.f_lineno
                arcs.add((number, before, line))
                before = line
            return step

        return step


def lines_of(arcs: Iterable[Arc]) -> int:
    """How many lines were reached."""
    return len({(number, line) for number, _, line in arcs})
