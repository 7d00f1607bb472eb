"""Renders qsub scripts. Pure.

qsub searches a whole script for directives, so every line is either constant or made of
checked values (``tfcluster.schedulers.script``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tfcluster.errors import ConfigError, Problem
from tfcluster.model import Description
from tfcluster.schedulers.base import LauncherCommand
from tfcluster.schedulers.options import (
    ARRAY,
    ENVIRONMENT,
    FOLLOWS,
    NOTHING,
    OUTPUT,
    SCRIPT,
    OptionTable,
    lines,
)
from tfcluster.schedulers.script import require_plain
from tfcluster.schedulers.sge.request import sge_slots
from tfcluster.schedulers.sge.settings import SgeSettings

_PLAIN = re.compile(r"[A-Za-z0-9_./+@=,:%*|!&-]+")
_PATH = re.compile(r"[A-Za-z0-9_./+@=,%~<>-]+")
"""In a path, ``$`` would begin a qsub variable, and ``:`` would end a host name."""
OPTIONS = OptionTable(
    command="qsub",
    plain=_PLAIN,
    denied={
        "-@": "options come from this file only",
        "-C": "it would change which lines are directives",
        "-S": "the script is written for bash",
        "-V": "other users could see the environment; use 'env:' and 'secrets:'",
        "-b": SCRIPT,
        "-clear": "it would undo the options before it",
        "-e": "standard error goes where standard output goes",
        "-help": NOTHING,
        "-i": "the launcher reads no input",
        "-inherit": "it is for tasks of a job, not for jobs",
        "-j": "standard error goes where standard output goes",
        "-now": FOLLOWS,
        "-o": OUTPUT,
        "-r": "a run is not restarted by the scheduler",
        "-shell": SCRIPT,
        "-sync": FOLLOWS,
        "-t": ARRAY,
        "-tc": "array jobs are not supported",
        "-terse": "tfcluster reads qsub's answer",
        "-v": ENVIRONMENT,
        "-verify": NOTHING,
        "-w": "tfcluster needs qsub to refuse jobs that can never run",
    },
)


def directives(
    description: Description, sge: SgeSettings, launcher: LauncherCommand
) -> Iterator[str]:
    """The lines of the script between its heading and its commands."""
    yield from (f"#$ {line}" for line in _asked(description, sge))
    yield ""
    yield from _fixed(launcher)


def _asked(description: Description, sge: SgeSettings) -> Iterator[str]:
    """The directives for the settings of the Description."""
    yield f"-N {_job_name(description)}"
    slots = sge_slots(description, sge)
    if sge.parallel_environment is not None:
        environment = sge.parallel_environment
        yield f"-pe {_value('sge.parallel_environment', environment)} {slots:d}"
    elif not any(option == "-pe" for option in sge.options):
        raise ConfigError([_missing_environment(description)])
    if sge.queue is not None:
        yield f"-q {_value('sge.queue', sge.queue)}"
    for name, value in sge.resources.items():
        yield f"-l {_value(f'sge.resources.{name}', f'{name}={value}')}"
    yield from lines(sge.options)


def _job_name(description: Description) -> str:
    """The run's name; for Grid Engine it must not begin with a digit."""
    name = _value("name", description.name)
    return f"j{name}" if name[0].isdigit() else name


def _missing_environment(description: Description) -> Problem:
    where = description.origins.get("sge") or description.source
    return Problem(
        where,
        "sge.parallel_environment is not set: without one a job has a single slot",
        "`qconf -spl` lists those of this cluster",
    )


def _fixed(launcher: LauncherCommand) -> Iterator[str]:
    """The directives that every job has."""
    log = str(launcher.log)
    require_plain("state folder", log)
    if not _PATH.fullmatch(log):
        raise ConfigError(
            [
                Problem(
                    "state folder",
                    f"qsub does not accept the path {log!r}",
                    "set TFCLUSTER_STATE_DIR to a path of letters, digits and . _ + @ "
                    "= , % ~ / -",
                )
            ]
        )
    yield "#$ -S /bin/bash"
    yield "# The launcher's output; task output is in the folder logs."
    yield f"#$ -o {log}"
    yield "#$ -j y"
    yield "# A warning signal to the launcher before the job is killed."
    yield "#$ -notify"
    yield "# A lost host ends the run; it is not restarted silently."
    yield "#$ -r n"


def _value(where: str, text: str) -> str:
    """``text`` if qsub reads it back from a directive unchanged. Raises ConfigError."""
    if not _PLAIN.fullmatch(require_plain(where, text)):
        problem = f"{text!r} cannot be used in a directive of qsub"
        raise ConfigError([Problem(where, problem)])
    return text
