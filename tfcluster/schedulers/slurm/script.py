"""Renders sbatch scripts. Pure.

Directives are made only from checked values; the script's commands are constant
(``tfcluster.schedulers.script``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import ceil

from tfcluster.base.durations import time_limit_s
from tfcluster.base.errors import ConfigError, Problem
from tfcluster.plan.model import Description
from tfcluster.schedulers.base import LauncherCommand
from tfcluster.schedulers.options import ARRAY, FOLLOWS, NOTHING, OptionTable
from tfcluster.schedulers.script import require_plain
from tfcluster.schedulers.slurm.request import (
    QUOTABLE,
    SLURM_KEYS,
    SlurmSettings,
    slurm_options,
    slurm_request,
)

WARNING_S = 60
"""The launcher is warned at least this long before the time limit."""
_SWEEP_S = 20
"""How long the end of a run may take beyond the grace period of its tasks."""
_RESULTS_S = 60
"""How long results may take to come back before the job is requeued."""

_PLAIN = re.compile(r"[A-Za-z0-9_./+@=,:%*-]+")
OPTIONS = OptionTable(
    command="sbatch",
    joined=True,
    plain=QUOTABLE,
    denied={
        "--wrap": "the script defines what runs",
        "--uid": "a job runs as the user who submits it",
        "--gid": "a job runs as the user who submits it",
        "--parsable": "tfcluster reads sbatch's answer",
        "--wait": FOLLOWS,
        "--test-only": NOTHING,
        "--chdir": "'workdir' sets where tasks run",
        "--help": NOTHING,
        "--usage": NOTHING,
        "--version": NOTHING,
        "--array": ARRAY,
        "--clusters": "the run's record could not be found there",
    },
    letters={"W": "--wait", "D": "--chdir", "h": "--help", "V": "--version"}
    | {"a": "--array", "M": "--clusters"},
)


def directives(
    description: Description, slurm: SlurmSettings, launcher: LauncherCommand
) -> Iterator[str]:
    """The lines of the script between its heading and its commands."""
    yield from (f"#SBATCH {line}" for line in _asked(description, slurm))
    yield ""
    yield from _fixed(description, slurm, launcher)


def _asked(description: Description, slurm: SlurmSettings) -> Iterator[str]:
    """The directives for the settings of the Description."""
    asked = slurm_request(description, slurm)
    given = slurm_options(slurm)
    yield f"--job-name={_value('name', description.name)}"
    size = {
        "--nodes": asked.nodes,
        "--ntasks": asked.tasks,
        "--ntasks-per-node": asked.tasks_per_node,
        "--gpus-per-node": asked.gpus_per_node,
        "--gpus-per-task": asked.gpus_per_task,
    }
    for option in dict.fromkeys((*size, *SLURM_KEYS)):
        key = SLURM_KEYS.get(option, "")
        value = size[option] if option in size else getattr(slurm, key)
        if value is not None and option not in given:
            yield f"{option}={_value(f'slurm.{key}', str(value))}"
    for option in slurm.options:
        name, equals, value = option.partition("=")
        yield f"{name}={_value(name, value)}" if equals else _value(name, option)


def _fixed(
    description: Description, slurm: SlurmSettings, launcher: LauncherCommand
) -> Iterator[str]:
    """The directives that every job has, unless its options set them."""
    options = slurm.options
    if not _given(options, "--export"):
        yield "# Pass nothing from the submitting shell; use 'env:' and 'secrets:'."
        yield "#SBATCH --export=NONE"
    if not _given(options, "--signal"):
        yield "# A warning signal to the launcher, which ends the run with code 124."
        yield f"#SBATCH --signal=B:USR1@{_warning_s(description, slurm)}"
    if not _given(options, "--output", "o"):
        yield "# The launcher's output; task output is in the folder logs."
        log = str(launcher.log).replace("%", "%%")
        yield f"#SBATCH --output={_value('state folder', log)}"
    yield "#SBATCH --open-mode=append"
    if description.restart.requeues:
        yield "# After the time limit the launcher asks Slurm to start the job again."
        yield "#SBATCH --requeue"


def _warning_s(description: Description, slurm: SlurmSettings) -> int:
    """The seconds that an orderly end needs, but at most a quarter of a short limit."""
    wanted = max(WARNING_S, ceil(description.grace_s) + _SWEEP_S)
    if description.restart.requeues and description.results is not None:
        wanted += _RESULTS_S
    limit_s = None if slurm.time is None else time_limit_s(slurm.time)
    return wanted if limit_s is None else min(wanted, max(10, limit_s // 4))


def _value(where: str, text: str) -> str:
    """``text``, quoted for an sbatch directive if needed. Raises ConfigError."""
    require_plain(where, text)
    if _PLAIN.fullmatch(text):
        return text
    if not QUOTABLE.fullmatch(text):
        problem = f"{text!r} cannot be used in a directive of sbatch"
        raise ConfigError([Problem(where, problem)])
    return f'"{text}"'


def _given(options: tuple[str, ...], long: str, letter: str = "") -> bool:
    return any(
        option.partition("=")[0] == long
        or (bool(letter) and option.startswith(f"-{letter}"))
        for option in options
    )
