"""What of a run is displayed, and how. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Display:
    """What the user has chosen."""

    quiet: bool = False
    """Only warnings, errors and the result: no output of tasks, no progress."""
    everything: bool = False
    """Also lines that are usually left out."""
    only: tuple[str, ...] = ()
    """Tasks (``worker:0``) and types (``worker``) to display the output of; (): all."""
    timestamps: bool = False
    """Each line of a task begins with the time at which it was displayed."""
    colours: bool | None = None
    """None: on a terminal, unless NO_COLOR is set."""

    def shows(self, task: str) -> bool:
        """Whether the output of this task is displayed."""
        if self.quiet:
            return False
        return not self.only or task in self.only or task.split(":")[0] in self.only

    def stamp(self, now_s: float) -> str:
        """What a line begins with: ``14:02:31.250 ``, or nothing."""
        if not self.timestamps:
            return ""
        clock = time.strftime("%H:%M:%S", time.localtime(now_s))
        return f"{clock}.{int(now_s % 1 * 1000):03d} "


def is_debugging(environ: Mapping[str, str]) -> bool:
    """Whether TFCLUSTER_DEBUG asks for lines that are otherwise left out."""
    return environ.get("TFCLUSTER_DEBUG", "") not in ("", "0")


DEFAULT = Display()
