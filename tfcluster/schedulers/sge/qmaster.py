"""Asks the qmaster about our own running job and its queue.

Pure functions parse the answers; only ``Qmaster`` runs commands, never for longer than
``ASK_S``, because its callers are in a hurry.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

from tfcluster.base.errors import StartError
from tfcluster.base.light_dataclasses import dataclass
from tfcluster.schedulers.base import output_of

ASK_S = 3.0

_LIMITS = ("h_rt", "s_rt")
_TIME = r"(?:^|=)(?=[0-9:])([0-9]{0,9}(?::[0-9]{0,9}){0,2})(?![0-9:])"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What ``qstat -j`` says about a running job."""

    notify: bool
    """Whether the job is warned before it is killed (qsub -notify)."""
    began_s: float
    """The Unix time of its start; 0: unknown."""
    limits_s: Mapping[str, float]
    """Its requested limits ``h_rt`` and ``s_rt``, in seconds."""
    waits: bool = False
    """Whether it is queued although we run: then it was rescheduled."""

    def is_over_time(self, now_s: float) -> bool:
        """Whether a limit is reached; qmaster's clock may differ by 2 s."""
        limit_s = min(self.limits_s.values(), default=0.0)
        return bool(limit_s and self.began_s) and now_s >= self.began_s + limit_s - 2

    def is_rescheduled(self, launched_s: float) -> bool:
        """Whether the job was restarted after the launcher's start (Unix time)."""
        return self.waits or self.began_s > launched_s + 2


@dataclass(frozen=True, slots=True)
class Qmaster:
    """Asks qstat and qconf. ``environ`` is the job's environment."""

    environ: Mapping[str, str]

    def job(self) -> JobFacts | None:
        """The facts about this job; None: unknown."""
        said = self._ask("qstat", "-j", self.environ.get("JOB_ID", ""), "-xml")
        return parse_job(said)

    def notice_s(self) -> float | None:
        """Seconds from the queue's warning to its SIGKILL; None: unknown."""
        queue = self.environ.get("QUEUE")
        return parse_notice(self._ask("qconf", "-sq", queue)) if queue else None

    def _ask(self, name: str, *words: str) -> str:
        try:
            program = find_program(name, self.environ)
        except StartError:
            return ""
        return output_of((program, *words), self.environ, ASK_S)


def parse_job(said: str) -> JobFacts | None:
    """Parse the answer to ``qstat -j JOB -xml``; None if it is not such an answer."""
    try:
        root = ElementTree.fromstring(said)
    except ElementTree.ParseError:
        return None
    if root.find(".//JB_job_number") is None:
        return None
    limits = {}
    for request in root.iter("qstat_l_requests"):
        name, value = request.findtext("CE_name"), request.findtext("CE_doubleval")
        limit_s = _seconds_of(value)
        if name in _LIMITS and limit_s is not None:
            limits[name] = limit_s
    return JobFacts(
        notify=root.findtext(".//JB_notify") in ("true", "1"),
        began_s=_seconds_of(root.findtext(".//JAT_start_time")) or 0.0,
        limits_s=limits,
        waits=root.findtext(".//JAT_status") == "0",
    )


def _seconds_of(text: str | None) -> float | None:
    """A time or a duration in an answer; None if it is missing or not a number."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def parse_notice(said: str) -> float | None:
    """The least of ``notify 00:00:60,[node1=00:01:30]`` (``qconf -sq``), in seconds."""
    line = re.search(r"^notify\s+(.*)$", said.replace("\\\n", ""), re.MULTILINE)
    times = re.findall(_TIME, line[1]) if line else []
    return min(map(seconds, times), default=None)


def seconds(text: str) -> float:
    """``90``, ``1:30`` or ``0:1:30`` in seconds; the last part may exceed 59."""
    total = 0
    for part in text.split(":"):
        total = total * 60 + int(part or 0)
    return float(total)


def find_program(name: str, env: Mapping[str, str]) -> str:
    """The path of a program such as qrsh. Raises StartError if there is none.

    A program that is not on the job's PATH is sought below SGE_ROOT.
    """
    folders = [env.get("PATH", "")]
    if root := env.get("SGE_ROOT"):
        arch = env.get("SGE_ARCH") or env.get("ARC", "")
        folders.append(str(Path(root, "bin", arch)))
    for folder in folders:
        if found := shutil.which(name, path=folder):
            return found
    raise StartError(
        f"{name} is not found",
        hint="put Grid Engine's programs on the PATH of the job",
    )
