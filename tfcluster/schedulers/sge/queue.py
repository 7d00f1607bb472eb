"""Queues and follows a job with qsub, qstat and qacct. Pure but for ``ask``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from tfcluster.base.light_dataclasses import replace
from tfcluster.schedulers.base import (
    Ask,
    CommandAnswer,
    JobPhase,
    JobState,
    SchedulerError,
    one_line,
    refusal,
)

_JOB_ID = re.compile(r"([1-9][0-9]*)")
_NUMBER_IN_ANSWER = re.compile(r'[Yy]our job ([1-9][0-9]*) \("')

_HINTS = {
    "parallel environment": "`qconf -spl` lists them; sge: {parallel_environment: ...}",
    "unknown queue": "`qconf -sql` lists the queues; sge: {queue: ...}",
    "unknown resource": "`qconf -sc` lists the resources; sge: {resources: {...}}",
    "no suitable queues": "`qstat -g c` and `qhost -F` show what is available",
    "is no submit host": "submit on another host: `qconf -ss` lists them",
    "unable to contact qmaster": "`qping` and `qhost` check it",
    "unable to send message to qmaster": "`qping` and `qhost` check it",
    "cell directory": "SGE_ROOT and SGE_CELL must locate Grid Engine",
}


def submit(script: Path, ask: Ask) -> str:
    """The last line that is an id: prologs and JSVs may print lines before it."""
    answer = ask(("qsub", "-terse", str(script)))
    if answer.exit_code == 0:
        for line in reversed(answer.stdout.splitlines()):
            match = _JOB_ID.fullmatch(line.strip()) or _NUMBER_IN_ANSWER.match(
                line.strip()
            )
            if match is not None:
                return match[1]
    raise _refusal(answer)


def _refusal(answer: CommandAnswer) -> SchedulerError:
    """``Unable to run job: REASON`` and ``Exiting.``, on either stream."""
    said = [
        re.sub(r"^(?:Unable to run job|error|denied): ", "", line.strip())
        for line in (answer.stderr + "\n" + answer.stdout).splitlines()
        if line.strip() and line.strip() != "Exiting."
    ]
    return refusal("qsub", "; ".join(dict.fromkeys(said)), _HINTS)


_GONE = re.compile(r"<unknown_jobs|[Jj]obs? do(?:es)? not exist")
_STAMP = re.compile(r"^\d\d/\d\d/\d{4} [\d:.]+ (?:\[\d+:\d+\]: )?(?:error: )?")
"""``11/21/2026 04:24:37 [0:203]: error: `` before the reason of an error."""
_SHOWN_REASONS = 3
_MAX_DIGITS = 20
_FINISHED = 0x10000
"""The bit JFINISHED of JAT_status; a status of 0 means that the task has not begun."""


def state(job: str, ask: Ask) -> JobState:
    state = job_state(job, ask(("qstat", "-j", job, "-xml")))
    if state.phase is not JobPhase.GONE:
        return state
    return replace(state, reason=verdict(ask(("qacct", "-j", job)).stdout))


def job_state(job: str, answer: CommandAnswer) -> JobState:
    """The state of ``job``. Raises SchedulerError if the answer is unusable."""
    if _GONE.search(answer.stdout + answer.stderr):
        return JobState(JobPhase.GONE, "gone")
    try:
        root = ElementTree.fromstring(answer.stdout)
    except ElementTree.ParseError as error:
        raise SchedulerError(one_line(answer) or "qstat prints nothing") from error
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
