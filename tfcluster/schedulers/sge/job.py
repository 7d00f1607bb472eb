"""Finds a job's hosts from the job's environment and its host file.

Reads only the host file, which exists on no other host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tfcluster.errors import ConfigError, Problem, StartError
from tfcluster.schedulers.own_host import own_names


class HostfileError(ValueError):
    """The text is not a host file; the message says why."""


_MAX_DIGITS = 9
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?")
"""A host's name; one that begins with ``-`` would be an option of qrsh."""


def slots_by_host(text: str) -> dict[str, int]:
    """Host -> slots, in the file's order, with names exactly as in the file.

    A line is ``HOST SLOTS [QUEUE@HOST [PROCESSORS]]`` (sge_pe(5)): the queue and the
    processors (``UNDEFINED`` or ``0,1:0,2``) are not needed here, and some variants
    leave them out. A host with slots in several queues has a line for each, so slots
    are summed. Raises HostfileError if the text is not such a file.
    """
    slots: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words:
            continue
        shown = f"line {number}: {line[:80]!r}"
        if len(words) < 2:
            raise HostfileError(f"{shown} has too few fields: expected HOST SLOTS")
        name, count = words[:2]
        if not _NAME.fullmatch(name):
            raise HostfileError(f"{shown} does not begin with a host name")
        if not count.isascii() or not count.isdecimal() or len(count) > _MAX_DIGITS:
            raise HostfileError(f"{shown}: the second field is not a number of slots")
        slots[name] = slots.get(name, 0) + int(count)
    granted = {name: count for name, count in slots.items() if count}
    if not granted:
        raise HostfileError("lists no host with slots")
    return granted


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
