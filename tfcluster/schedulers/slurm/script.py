"""The directives of sbatch scripts. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import ceil

from tfcluster.base.durations import time_limit_s
from tfcluster.base.errors import ConfigError, Problem
from tfcluster.plan.model import Description
from tfcluster.schedulers.base import LauncherCommand
from tfcluster.schedulers.slurm.request import (
    QUOTABLE,
    SLURM_KEYS,
    SlurmSettings,
    job_size,
    slurm_options,
)

WARNING_S = 60
"""The launcher is warned at least this long before the time limit."""
_SWEEP_S = 20
"""How long the end of a run may take beyond the grace period of its tasks."""
_RESULTS_S = 60
"""How long results may take to come back before the job is requeued."""

_PLAIN = re.compile(r"[A-Za-z0-9_./+@=,:%*-]+")


def directives(
    description: Description, slurm: SlurmSettings, launcher: LauncherCommand
) -> Iterator[str]:
    """The lines of the script between its heading and its commands."""
    yield from (f"#SBATCH {line}" for line in _requests(description, slurm))
    yield ""
    yield from _fixed(description, slurm, launcher)


def _requests(description: Description, slurm: SlurmSettings) -> Iterator[str]:
    """The directives for the settings of the Description."""
    size, options = job_size(description, slurm), slurm_options(slurm)
    yield f"--job-name={_value('name', description.name)}"
    for option in dict.fromkeys((*size, *SLURM_KEYS)):
        key = SLURM_KEYS.get(option, "")
        value = size[option] if option in size else getattr(slurm, key)
        if value is not None and option not in options:
            yield f"{option}={_value(f'slurm.{key}', str(value))}"
    for option in slurm.options:
        name, equals, value = option.partition("=")
        yield f"{name}={_value(name, value)}" if equals else _value(name, option)


def _fixed(
    description: Description, slurm: SlurmSettings, launcher: LauncherCommand
) -> Iterator[str]:
    """The directives that every job has, unless its options set them."""
    options = slurm_options(slurm)
    if "--export" not in options:
        yield "# Pass nothing from the submitting shell; use 'env:' and 'secrets:'."
        yield "#SBATCH --export=NONE"
    if "--signal" not in options:
        yield "# A warning signal to the launcher, which ends the run with code 124."
        yield f"#SBATCH --signal=B:USR1@{_warning_s(description, slurm)}"
    if "--output" not in options:
        yield "# The launcher's output; task output is in the folder logs."
        log = str(launcher.log).replace("%", "%%")
        yield f"#SBATCH --output={_value('state folder', log)}"
    yield "#SBATCH --open-mode=append"
    if description.restart.requeues:
        yield "# After the time limit the launcher asks Slurm to start the job again."
        yield "#SBATCH --requeue"


def _warning_s(description: Description, slurm: SlurmSettings) -> int:
    """The seconds that an orderly end needs, but at most a quarter of a short limit."""
    needed_s = max(WARNING_S, ceil(description.grace_s) + _SWEEP_S)
    if description.restart.requeues and description.results is not None:
        needed_s += _RESULTS_S
    limit_s = None if slurm.time is None else time_limit_s(slurm.time)
    return needed_s if limit_s is None else min(needed_s, max(10, limit_s // 4))


def _value(where: str, text: str) -> str:
    """``text``, quoted for an sbatch directive if needed. Raises ConfigError."""
    if _PLAIN.fullmatch(text):
        return text
    if not QUOTABLE.fullmatch(text):
        problem = f"{text!r} cannot be used in a directive of sbatch"
        raise ConfigError([Problem(where, problem)])
    return f'"{text}"'
