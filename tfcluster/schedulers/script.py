"""The script that is submitted, apart from the directives of a scheduler. Pure.

Each value of a line is checked by ``require_plain``: text with a line break could
become another directive.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator

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
        message = f"{value!r} cannot be used in a script: it is not one line"
        raise ConfigError([Problem(where, message)])
    return value


def job_script(
    scheduler: BatchScheduler, description: Description, launcher: LauncherCommand
) -> str:
    """The script to submit. Raises ConfigError for values that it cannot hold."""
    settings = scheduler.settings_in(description)
    mistakes = [
        *option_mistakes(scheduler, description),
        *scheduler.mistakes(description, settings),
    ]
    if wrong := [mistake for mistake in mistakes if mistake.fatal]:
        raise ConfigError(
            [Problem(_where(m.key, description), m.message, m.hint) for m in wrong]
        )
    directives = scheduler.directives(description, settings, launcher)
    lines = [
        "#!/bin/bash",
        *_heading(description),
        "",
        *(require_plain("directive", line) for line in directives),
        "",
        *_commands(launcher),
        "",
    ]
    return "\n".join(lines)


def option_mistakes(
    scheduler: Scheduler, description: Description
) -> Iterator[Mistake]:
    """The user's own options that are refused, in any scheduler's section."""
    section = description.sections.get(scheduler.name, {})
    if scheduler.options is None or scheduler.settings is None:
        return
    keys = {
        key.metadata["option"]: key.name
        for key in dataclasses.fields(scheduler.settings)
        if key.metadata["option"] and section.get(key.name) is not None
    }
    options = section.get("options", ())
    yield from scheduler.options.mistakes(scheduler.name, options, keys)


def into_log(launcher: LauncherCommand) -> list[str]:
    """Commands for a scheduler that would keep a job's output until its end."""
    comment = "# The launcher's output; task output is in the folder logs."
    return [comment, f"exec >> {shlex.quote(str(launcher.log))} 2>&1"]


def _where(key: str, description: Description) -> str:
    words = key.split(".")
    above = (".".join(words[:count]) for count in range(len(words), 0, -1))
    return next(filter(None, map(description.origins.get, above)), key)


def _heading(description: Description) -> list[str]:
    counts = [
        f"{description.tasks[kind].count} {kind}"
        for kind in TASK_TYPES
        if kind in description.tasks
    ]
    name = require_plain("name", description.name)
    return [f"# {name}: {', '.join(counts)}", f"# Written by tfcluster {__version__}."]


def _commands(launcher: LauncherCommand) -> list[str]:
    """The commands, which are constant except for three paths."""
    folder = require_plain("state folder", str(launcher.folder))
    home = require_plain("package", str(launcher.root or launcher.folder))
    python = require_plain("python", launcher.python)
    start = (python, "-m", "tfcluster", "launch", "--submitted", folder)
    return [
        "# The run's settings are in that folder, which only you can read.",
        "# The launcher replaces this shell, so that it receives the signals.",
        f"cd {shlex.quote(home)} || exit 4",
        f"exec {shlex.join(start)}",
    ]
