"""The script that is submitted, apart from the directives of a scheduler. Pure.

Values get into lines only through ``require_plain``: text with a line break could
become another directive.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from tfcluster import __version__
from tfcluster.base.errors import ConfigError, Problem
from tfcluster.base.vocabulary import TASK_TYPES
from tfcluster.plan.model import Description
from tfcluster.schedulers.base import BatchScheduler, LauncherCommand, Scheduler
from tfcluster.schedulers.options import Mistake

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


def job_script(
    scheduler: BatchScheduler, description: Description, launcher: LauncherCommand
) -> str:
    """The script to submit. Raises ConfigError for values that it cannot hold."""
    wrong = [each for each in mistakes(scheduler, description) if each.fatal]
    if wrong:
        raise ConfigError(
            [Problem(_where(m.key, description), m.message, m.hint) for m in wrong]
        )
    settings = scheduler.settings_in(description)
    lines = ["#!/bin/bash", *_heading(description), ""]
    lines += [
        *scheduler.directives(description, settings, launcher),
        "",
        *_body(launcher),
        "",
    ]
    return "\n".join(lines)


def mistakes(scheduler: Scheduler, description: Description) -> Iterator[Mistake]:
    """What is wrong with the section of the description's scheduler."""
    yield from option_mistakes(scheduler, description)
    yield from scheduler.mistakes(description, scheduler.settings_in(description))


def option_mistakes(
    scheduler: Scheduler, description: Description
) -> Iterator[Mistake]:
    """The user's own options that are refused, in any scheduler's section."""
    given = description.sections.get(scheduler.name, {}).get("options", ())
    if scheduler.options is not None:
        yield from scheduler.options.mistakes(scheduler.name, given)


def into_log(launcher: LauncherCommand) -> list[str]:
    """Commands for a scheduler that would keep a job's output until its end."""
    log = require_plain("state folder", str(launcher.log))
    comment = "# The launcher's output; task output is in the folder logs."
    return [comment, f"exec >> {shlex.quote(log)} 2>&1"]


def _where(key: str, description: Description) -> str:
    """The place of a value, or else of what it is in."""
    words = key.split(".")
    above = (".".join(words[:count]) for count in range(len(words), 0, -1))
    return next(filter(None, map(description.origins.get, above)), key)


def _heading(description: Description) -> list[str]:
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


def _body(launcher: LauncherCommand) -> list[str]:
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
