"""Which lines of the tasks' output are worth a person's attention at the console.

Only the echo is meant: log files keep everything. With TFCLUSTER_DEBUG=1 so does it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

# C++ libraries of TensorFlow begin their lines so: I0000 00:00:1795394395.891576 ...
_NATIVE = re.compile(
    r"[IWEF]\d{4} \d\d:\d\d:|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWEF] "
)
_GPU_SEARCH = re.compile(
    r"failed call to cuInit|Could not find cuda drivers|"
    r"Cannot dlopen some GPU libraries|Unable to register cu\w+ factory|"
    r"computation placer already registered|Could not find TensorRT"
)
_OURS = re.compile(
    r"(?:CollectiveError|CollectiveMismatchError|CollectiveTimeoutError|PeerLostError|"
    r"NotDistributedError): "
)
# What follows such a line: a traceback that TensorFlow has put into its message.
_OF_DUMP = re.compile(
    r"\s|$|The above exception was|During handling of|"
    r"(?:[A-Za-z_]\w*\.)+\w*(?:Error|Exception)\b"
)
_TRACEBACK = "Traceback (most recent call last):"
_WARNING = re.compile(r"\S.*:\d+: \w*Warning: ")


def is_debugging(environ: Mapping[str, str]) -> bool:
    """The user wants to see what is otherwise left out."""
    return environ.get("TFCLUSTER_DEBUG", "") not in ("", "0")


HasGpus = Callable[[str], bool | None]
"""Whether a task has GPUs; None: nobody knows."""


class Echo:
    """Chooses from the lines of all tasks, each task's in their order."""

    def __init__(self, has_gpus: HasGpus, *, everything: bool = False) -> None:
        self._has_gpus = has_gpus
        self._everything = everything
        self._dumping: set[str] = set()
        self._held: dict[str, str] = {}
        """The first line of what may be a traceback of Python's own, behind a dump."""
        self._repeating: set[str] = set()
        """Tasks whose next line is the source line of a warning that is left out."""
        self._warned: dict[str, str] = {}
        """Warnings of Python that were shown, with the task that said them first."""

    def chosen(self, task: str, lines: Sequence[str]) -> Sequence[str]:
        """Those of a task's next lines that are to be shown."""
        if self._everything:
            return lines
        shown: list[str] = []
        for line in lines:
            held = self._held.pop(task, None)
            if held is not None and line.strip():
                # The lines of a dump have empty ones between them: this is the end.
                self._dumping.discard(task)
                shown.append(held)
            if self._is_wanted(task, line):
                shown.append(line)
        return shown

    def _is_wanted(self, task: str, line: str) -> bool:
        if task in self._repeating:
            self._repeating.discard(task)
            if line.startswith("  "):
                return False
        if _NATIVE.match(line):
            self._dumping.discard(task)
            if _OURS.search(line):
                # Python says the same at the end, with the place in the program.
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
        if _WARNING.match(line) and self._warned.setdefault(line, task) != task:
            self._repeating.add(task)
            return False
        return True
