"""Parses the state of a Grid Engine job from ``qstat -j JOB -xml``. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from xml.etree import ElementTree

from tfcluster.schedulers.base import CommandAnswer, JobPhase, JobState, SchedulerError

_GONE = re.compile(r"<unknown_jobs|[Jj]obs? do(?:es)? not exist")
_STAMP = re.compile(r"^\d\d/\d\d/\d{4} [\d:.]+ (?:\[\d+:\d+\]: )?(?:error: )?")
"""``11/21/2026 04:24:37 [0:203]: error: `` before the reason of an error."""
_SHOWN_REASONS = 3
_MAX_DIGITS = 20
_FINISHED = 0x10000
"""The bit JFINISHED of JAT_status; a status of 0 means that the task has not begun."""


def job_state(job: str, answer: CommandAnswer) -> JobState:
    """The state of ``job``. Raises SchedulerError if the answer is unusable."""
    if _GONE.search(answer.stdout + answer.stderr):
        return JobState(JobPhase.GONE, "gone")
    try:
        root = ElementTree.fromstring(answer.stdout)
    except ElementTree.ParseError as error:
        said = " ".join((answer.stderr or answer.stdout).split())
        raise SchedulerError(said[:300] or "qstat prints nothing") from error
    if root.tag != "detailed_job_info":
        # qstat gives this answer, without an error code, if the qmaster is unreachable.
        said = "; ".join(_texts(root.iter("AN_text")))
        raise SchedulerError(said or f"qstat does not list job {job}")
    if job not in (found.text for found in root.iter("JB_job_number")):
        return JobState(JobPhase.GONE, "gone")
    errors = _texts(root.iter("QIM_message"))
    if errors:
        told = "; ".join(_STAMP.sub("", text) for text in errors[:_SHOWN_REASONS])
        mend = f"`qmod -cj {job}` lets it try again, `qdel {job}` removes it"
        return JobState(JobPhase.PENDING, "in error (Eqw)", f"{told} ({mend})")
    statuses = [
        int(text)
        for text in _texts(root.iter("JAT_status"))
        if text.isdecimal() and len(text) <= _MAX_DIGITS
    ]
    if any(status & _FINISHED for status in statuses):
        return JobState(JobPhase.OVER, "over")
    if any(statuses):
        return JobState(JobPhase.RUNNING, "running")
    reasons = _reasons(root)
    held = any("hold state" in reason for reason in reasons)
    if held:
        return JobState(JobPhase.PENDING, "held (hqw)", f"`qrls {job}` releases it")
    return JobState(JobPhase.PENDING, "waiting (qw)", _folded(reasons))


def _reasons(root: ElementTree.Element) -> list[str]:
    """Why the job has not started; reasons about this job alone come first.

    Empty if the site has turned reasons off (sched_conf(5), ``schedd_job_info``).
    """
    own = [
        text
        for messages in root.iter("SME_message_list")
        for text in _texts(messages.iter("MES_message"))
    ]
    every = _texts(root.iter("MES_message"))
    return list(dict.fromkeys([*own, *every]))


def _folded(reasons: list[str]) -> str | None:
    if not reasons:
        return None
    rest = len(reasons) - _SHOWN_REASONS
    shown = "; ".join(reasons[:_SHOWN_REASONS])
    return f"{shown} (and {rest} more)" if rest > 0 else shown


def _texts(elements: Iterable[ElementTree.Element]) -> list[str]:
    """The texts of the elements, each as one line."""
    return [" ".join(element.text.split()) for element in elements if element.text]
