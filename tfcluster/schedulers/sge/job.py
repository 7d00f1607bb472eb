"""Finds a job's hosts from the job's environment.

Reads only the host file, which exists on no other host.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tfcluster.errors import ConfigError, Problem, StartError
from tfcluster.schedulers.own_host import own_names
from tfcluster.schedulers.sge.hostfile import HostfileError, slots_by_host

_STALE = (
    "start a new shell, or `unset JOB_ID SGE_TASK_ID PE_HOSTFILE`, if this shell is "
    "not inside a job"
)


def is_inside(env: Mapping[str, str]) -> bool:
    """Whether this is the environment of a job's script.

    ``JOB_ID`` alone does not suffice: other programs than Grid Engine set it, too.
    """
    return "JOB_ID" in env and "SGE_TASK_ID" in env


def granted_slots(env: Mapping[str, str]) -> dict[str, int]:
    """Host -> slots, in the scheduler's order.

    Raises StartError outside of a job, ConfigError if the host file is unusable.
    """
    if not is_inside(env):
        raise StartError(
            "not inside a Grid Engine job",
            hint="`tfcluster submit`, or launch in a job that was submitted with -pe",
        )
    path = env.get("PE_HOSTFILE")
    if not path:
        if parallel := _parallel(env):
            problem = f"is not set, but the job is a parallel one: {parallel}"
            raise ConfigError([Problem("PE_HOSTFILE", problem, _STALE)])
        # Submitted without -pe: one slot on one host.
        return {own_names(env)[0]: 1}
    try:
        text = Path(path).read_text(encoding="utf-8", errors="backslashreplace")
        return slots_by_host(text)
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        hint = "it exists only while the job runs, on the host of its script"
        raise _broken(path, problem, f"{hint}; {_STALE}") from error
    except HostfileError as error:
        raise _broken(path, str(error), _STALE) from error


def _parallel(env: Mapping[str, str]) -> str | None:
    """The variable that shows that the job was submitted with -pe (submit(1))."""
    if env.get("PE"):
        return f"PE={env['PE']}"
    slots = env.get("NSLOTS", "")
    several = (
        slots.isascii() and slots.isdecimal() and len(slots) < 10 and int(slots) > 1
    )
    return f"NSLOTS={slots}" if several else None


def _broken(path: str, problem: str, hint: str) -> ConfigError:
    return ConfigError([Problem(f"PE_HOSTFILE={path!r}", problem, hint)])
