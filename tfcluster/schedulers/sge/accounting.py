"""Parses ``qacct -j JOB``, for a job that qstat no longer knows. Pure.

Grid Engine writes its accounting late (15 s or more), and a site may keep none at all,
so a missing entry means nothing.
"""

from __future__ import annotations

import re

_RULE = re.compile(r"^=+$", re.MULTILINE)
_RESCHEDULED = "25"
"""The code in ``failed`` if the job was rescheduled and started again."""


def verdict(text: str) -> str | None:
    """How the job ended, in a few words; None: there is no entry.

    ``failed 100 : assumedly after job, exit status 137 (Killed)``
    """
    records = [record for part in _RULE.split(text) if (record := _fields(part))]
    ended = [record for record in records if "exit_status" in record]
    if not ended:
        return None
    own = _of_the_job(ended)
    failed = own.get("failed", "0")
    status = f"exit status {own['exit_status']}"
    return status if _number(failed) == "0" else f"failed {failed}, {status}"


def _fields(part: str) -> dict[str, str]:
    """The keys and values of ``key   value`` lines."""
    pairs = (line.split(None, 1) for line in part.splitlines())
    return {pair[0]: " ".join(pair[1].split()) for pair in pairs if len(pair) == 2}


def _of_the_job(records: list[dict[str, str]]) -> dict[str, str]:
    """The job's own record: each qrsh also has one, but none lasts as long.

    Records of earlier starts of a rescheduled job do not count.
    """
    lives = [r for r in records if _number(r.get("failed", "0")) != _RESCHEDULED]
    return max(lives or records, key=_wallclock_s)


def _number(text: str) -> str:
    return text.split()[0] if text.split() else "0"


def _wallclock_s(record: dict[str, str]) -> float:
    """The seconds, written as ``12s``, ``12`` or ``12.345``."""
    match = re.match(r"[0-9]+(?:\.[0-9]+)?", record.get("ru_wallclock", ""))
    return float(match[0]) if match else 0.0
