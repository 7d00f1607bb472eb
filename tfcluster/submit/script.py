"""What the submit scripts of all schedulers have in common. Pure.

Values get into lines only through ``require_plain``: text with a line break could
become another directive.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from tfcluster import __version__
from tfcluster.errors import ConfigError, Problem
from tfcluster.model import Description
from tfcluster.submit.scheduler import Launcher
from tfcluster.vocabulary import TASK_TYPES

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def require_plain(where: str, value: str) -> str:
    """``value`` if it is one line; ``where`` is its name. Raises ConfigError."""
    if _CONTROL.search(value):
        raise ConfigError(
            [
                Problem(
                    where, f"{value!r} cannot be used in a script: it is not one line"
                )
            ]
        )
    return value


def heading(description: Description) -> list[str]:
    """Comments that say what the script is for."""
    counts = [
        f"{description.tasks[kind].count} {kind}"
        for kind in TASK_TYPES
        if kind in description.tasks
    ]
    name = require_plain("name", description.name)
    return [
        f"# {name}: {', '.join(counts)}",
        f"# Written by tfcluster {__version__}.",
    ]


def body(launcher: Launcher) -> list[str]:
    """The commands, which are constant except for three paths."""
    folder = require_plain("state folder", str(launcher.folder))
    home = require_plain("package", str(launcher.root or launcher.folder))
    python = require_plain("python", launcher.python)
    start: Sequence[str] = (
        python,
        "-m",
        "tfcluster",
        "launch",
        "--submitted",
        folder,
    )
    return [
        "# The run's settings are in that folder, which only you can read.",
        "# The launcher replaces this shell, so that it receives the signals.",
        f"cd {shlex.quote(home)} || exit 4",
        f"exec {shlex.join(start)}",
    ]
