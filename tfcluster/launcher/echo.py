"""Chooses which lines of the tasks' output are shown at the console.

Log files have every line. With ``-v`` the console shows every line, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

# How log lines of TensorFlow's C++ code begin: I0000 00:00:1795394395.891576 ...
_NATIVE = re.compile(
    r"[IWEF]\d{4} \d\d:\d\d:|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWEF] "
)
_BEFORE_NATIVE = "WARNING: All log messages before absl::InitializeLog() is called"
_GPU_SEARCH = re.compile(
    r"failed call to cuInit|Could not find cuda drivers|"
    r"Cannot dlopen some GPU libraries|Unable to register cu\w+ factory|"
    r"computation placer already registered|Could not find TensorRT"
)
_OURS = re.compile(
    r"(?:CollectiveError|CollectiveMismatchError|CollectiveTimeoutError|PeerLostError|"
    r"NotDistributedError): "
)
# Lines that follow such a line: a traceback that is part of TensorFlow's message.
_OF_DUMP = re.compile(
    r"\s|$|The above exception was|During handling of|"
    r"(?:[A-Za-z_]\w*\.)+\w*(?:Error|Exception)\b"
)
_TRACEBACK = "Traceback (most recent call last):"


HasGpus = Callable[[str], bool | None]
"""Whether a task has GPUs; None: unknown."""


class Echo:
    """Filters the output of all tasks; takes each task's lines in order."""

    def __init__(self, has_gpus: HasGpus, *, everything: bool = False) -> None:
        self._has_gpus = has_gpus
        self._everything = everything
        self._dumping: set[str] = set()
        self._held: dict[str, str] = {}
        """By task: a "Traceback" line inside a dump. If the next line is not empty,
        Python's own traceback begins there, which is shown."""

    def chosen(self, task: str, lines: Sequence[str]) -> Sequence[str]:
        """The lines to show out of a task's next lines."""
        if self._everything:
            return lines
        shown: list[str] = []
        for line in lines:
            held = self._held.pop(task, None)
            if held is not None and line.strip():
                # Empty lines separate the lines of a dump: this is its end.
                self._dumping.discard(task)
                shown.append(held)
            if self._is_wanted(task, line):
                shown.append(line)
        return shown

    def _is_wanted(self, task: str, line: str) -> bool:
        if line.startswith(_BEFORE_NATIVE):
            return False
        if _NATIVE.match(line):
            self._dumping.discard(task)
            if _OURS.search(line):
                # Python reports the same error later, with the program's line.
                self._dumping.add(task)
                return False
            return not (_GPU_SEARCH.search(line) and self._has_gpus(task) is False)
        if task in self._dumping:
            if line.startswith(_TRACEBACK):
                self._held[task] = line
                return False
            if _OF_DUMP.match(line):
                return False
            self._dumping.discard(task)
        return True
