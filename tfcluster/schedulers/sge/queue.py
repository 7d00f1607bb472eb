"""Grid Engine's commands: qsub, qstat, qacct, and ``qrsh -inherit`` within a job."""

from __future__ import annotations

import math
import os
import re
import select
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from xml.etree import ElementTree

from tfcluster.base.errors import StartError
from tfcluster.base.light_dataclasses import dataclass
from tfcluster.schedulers.base import (
    Ask,
    JobPhase,
    JobState,
    SchedulerError,
    one_line,
    output_of,
)
from tfcluster.schedulers.process_channel import ProcessChannel

JOB_ID = re.compile(
    r'^(?:[Yy]our job (?=[0-9]+ \("))?([1-9][0-9]*)(?= \("|\s*$)', re.MULTILINE
)
PREFIX = r"Unable to run job: |error: |denied: |Exiting\.$"

HINTS = {
    "parallel environment": "`qconf -spl` lists them; sge: {parallel_environment: ...}",
    "unknown queue": "`qconf -sql` lists the queues; sge: {queue: ...}",
    "unknown resource": "`qconf -sc` lists the resources; sge: {resources: {...}}",
    "no suitable queues": "`qstat -g c` and `qhost -F` show what is available",
    "is no submit host": "submit on another host: `qconf -ss` lists them",
    "unable to contact qmaster": "`qping` and `qhost` check it",
    "unable to send message to qmaster": "`qping` and `qhost` check it",
    "cell directory": "SGE_ROOT and SGE_CELL must locate Grid Engine",
}


_GONE = re.compile(r"<unknown_jobs|[Jj]obs? do(?:es)? not exist")
_STAMP = re.compile(r"^\d\d/\d\d/\d{4} [\d:.]+ (?:\[\d+:\d+\]: )?(?:error: )?")
"""``11/21/2026 04:24:37 [0:203]: error: `` before the reason of an error."""
_SHOWN_REASONS = 3
_MAX_DIGITS = 20
_FINISHED = 0x10000
"""The bit JFINISHED of JAT_status; a status of 0 means that the task has not begun."""


def state(job: str, ask: Ask) -> JobState:
    """The state of ``job``. Raises SchedulerError if the answer is unusable."""
    answer = ask(("qstat", "-j", job, "-xml"))
    if _GONE.search(answer.stdout + answer.stderr):
        return _gone(job, ask)
    try:
        root = ElementTree.fromstring(answer.stdout)
    except ElementTree.ParseError as error:
        raise SchedulerError(one_line(answer) or "qstat prints nothing") from error
    if root.tag != "detailed_job_info":
        # qstat gives this answer, without an error code, if the qmaster is unreachable.
        cause = "; ".join(_texts(root.iter("AN_text")))
        raise SchedulerError(cause or f"qstat does not list job {job}")
    if job not in (number.text for number in root.iter("JB_job_number")):
        return _gone(job, ask)
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
    if any("hold state" in reason for reason in reasons):
        return JobState(JobPhase.PENDING, "held (hqw)", f"`qrls {job}` releases it")
    return JobState(JobPhase.PENDING, "waiting (qw)", _folded(reasons))


def _gone(job: str, ask: Ask) -> JobState:
    reason = how_it_ended(ask(("qacct", "-j", job)).stdout)
    hint = f"`qacct -j {job}` may show later how it ended"
    return JobState(JobPhase.GONE, "gone", reason or hint)


def how_it_ended(accounting: str) -> str | None:
    """The end of a job in the accounting, where none of its tasks is as long."""
    ends = []
    for entry in accounting.split("=" * 40):
        facts = dict(re.findall(r"^(\w+) +(.*\S)", entry, re.MULTILINE))
        lasted = re.match(r"[0-9]{1,9}(?:\.[0-9]{1,9})?", facts.get("ru_wallclock", ""))
        if lasted and "exit_status" in facts and not facts["failed"].startswith("25 "):
            failed = "" if facts["failed"] == "0" else f"failed {facts['failed']}, "
            words = f"{failed}exit status {facts['exit_status']}"
            ends.append((float(lasted[0]), " ".join(words.split())))
    return max(ends)[1] if ends else None


def _reasons(root: ElementTree.Element) -> list[str]:
    """Why the job has not started (own reasons first), if the site shows it."""
    own = (part.iter("MES_message") for part in root.iter("SME_message_list"))
    return list(dict.fromkeys(_texts([*chain(*own), *root.iter("MES_message")])))


def _folded(reasons: list[str]) -> str | None:
    rest = len(reasons) - _SHOWN_REASONS
    shown = "; ".join(reasons[:_SHOWN_REASONS])
    return f"{shown} (and {rest} more)" if rest > 0 else shown or None


def _texts(elements: Iterable[ElementTree.Element]) -> list[str]:
    return [" ".join(element.text.split()) for element in elements if element.text]


_ASK_S = 3.0
"""The callers of what follows are in a hurry."""
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


def own_job(env: Mapping[str, str]) -> JobFacts | None:
    """The facts about the job that we are in; None: unknown."""
    return parse_job(_answer(env, "qstat", "-j", env.get("JOB_ID", ""), "-xml"))


def notice_s(env: Mapping[str, str]) -> float | None:
    """Seconds from the queue's warning to its SIGKILL; None: unknown."""
    queue = env.get("QUEUE")
    return parse_notice(_answer(env, "qconf", "-sq", queue)) if queue else None


def _answer(env: Mapping[str, str], name: str, *words: str) -> str:
    try:
        program = find_program(name, env)
    except StartError:
        return ""
    return output_of((program, *words), env, _ASK_S)


def parse_job(answer: str) -> JobFacts | None:
    """Parse the answer to ``qstat -j JOB -xml``; None if it is not such an answer."""
    try:
        root = ElementTree.fromstring(answer)
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


def parse_notice(answer: str) -> float | None:
    """The least of ``notify 00:00:60,[node1=00:01:30]`` (``qconf -sq``), in seconds."""
    line = re.search(r"^notify\s+(.*)$", answer.replace("\\\n", ""), re.MULTILINE)
    times = re.findall(_TIME, line[1]) if line else []
    return min(map(seconds, times), default=None)


def seconds(text: str) -> float:
    """``90``, ``1:30`` or ``0:1:30`` in seconds; the last part may exceed 59."""
    total = 0
    for part in text.split(":"):
        total = total * 60 + int(part or 0)
    return float(total)


def find_program(name: str, env: Mapping[str, str]) -> str:
    """The path of a program, on the PATH or below SGE_ROOT. Raises StartError."""
    folders = [env.get("PATH", "")]
    if root := env.get("SGE_ROOT"):
        arch = env.get("SGE_ARCH") or env.get("ARC", "")
        folders.append(f"{root}/bin/{arch}")
    for folder in folders:
        if path := shutil.which(name, path=folder):
            return path
    raise StartError(
        f"{name} is not found", hint="put Grid Engine's programs on the PATH of the job"
    )


START_S = 60.0
"""How long Grid Engine may take to start a process on the other host."""
_END_S = 3.0
"""How long qrsh may take to exit after SIGTERM; it notifies the other side first."""

_SHIELD = 'trap "" USR1 USR2; '
"""The signals of -notify go to every process of a task, and would kill processes that
have no handler."""
_BECOME = 'exec "$0" "$@"'
_READY = "echo; "
"""qrsh may lose input that it gets before the process runs, and then the process never
runs (seen with 8.1.9). So the process prints an empty line when it is ready."""

_MEANINGS = (
    (
        "didn't accept task",
        "Grid Engine accepts no task there: the parallel environment needs "
        "`control_slaves TRUE` (`qconf -sp NAME` shows it), and a slot must be free",
    ),
    ("can't resolve host name", "Grid Engine cannot resolve that host's name"),
    ("failed sending task to execd", "its sge_execd does not answer"),
)


def qrsh_argv(qrsh: str, host: str, argv: Sequence[str]) -> tuple[str, ...]:
    """The argv that runs ``argv`` on ``host``, named exactly as in PE_HOSTFILE.

    The user's shell on that host parses the words again, so each word is quoted.
    Standard input stays open (no ``-nostdin``), because it is the agent's channel.
    """
    over_there = ("/bin/sh", "-c", _SHIELD + _READY + _BECOME, *argv)
    return (qrsh, "-inherit", host, *map(shlex.quote, over_there))


def shielded(argv: Sequence[str]) -> tuple[str, ...]:
    """``argv`` with SIGUSR1 and SIGUSR2 ignored: the launcher handles them."""
    return ("/bin/sh", "-c", _SHIELD + _BECOME, *argv)


def meaning(words: str) -> str | None:
    """An explanation of qrsh's message, or None if it is unknown."""
    return next((text for sign, text in _MEANINGS if sign in words), None)


def start_process(
    host: str, argv: Sequence[str], timeout_s: float = START_S
) -> ProcessChannel:
    """Start a ``qrsh_argv`` and wait until the process runs. Raises StartError."""

    def explained(words: str, end: str) -> str:
        text = meaning(words)
        return f"{text}: {end}" if text else ""

    channel = ProcessChannel(host, argv, end_s=_END_S, explain=explained)
    readable, _, _ = select.select([channel], [], [], timeout_s)
    if readable and os.read(channel.fileno(), 1):
        return channel
    if readable:
        cause = channel.diagnosis() or "qrsh ended"
    else:
        cause = f"Grid Engine started nothing there in {timeout_s:g} s"
    channel.release(_END_S)
    raise StartError(f"{host}: no agent could be started: {cause}")
