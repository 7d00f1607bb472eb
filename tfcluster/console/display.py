"""Which parts of a run are displayed, and how. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tfcluster.light_dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Display:
    """What the user has chosen."""

    quiet: bool = False
    """Show only warnings, errors and the result: no task output, no progress."""
    everything: bool = False
    """Show lines that are usually left out, too."""
    only: tuple[str, ...] = ()
    """Tasks (``worker:0``) and types (``worker``) whose output is shown; (): all."""
    timestamps: bool = False
    """Begin each line of a task with the time at which it is displayed."""
    colours: bool | None = None
    """Whether to use colours; None: on a terminal, unless NO_COLOR is set."""

    def shows(self, task: str) -> bool:
        """Whether the output of this task is displayed."""
        if self.quiet:
            return False
        return not self.only or task in self.only or task.split(":")[0] in self.only

    def stamp(self, now_s: float) -> str:
        """The beginning of a line: ``14:02:31.250 ``, or nothing."""
        if not self.timestamps:
            return ""
        clock = time.strftime("%H:%M:%S", time.localtime(now_s))
        return f"{clock}.{int(now_s % 1 * 1000):03d} "


def is_debugging(environ: Mapping[str, str]) -> bool:
    """Whether TFCLUSTER_DEBUG asks for lines that are otherwise left out."""
    return environ.get("TFCLUSTER_DEBUG", "") not in ("", "0")


DEFAULT = Display()
