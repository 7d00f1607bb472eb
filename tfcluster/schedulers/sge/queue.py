"""Queues a job with qsub. Pure but for ``ask``."""

from __future__ import annotations

import re
from pathlib import Path

from tfcluster.schedulers.base import Ask, CommandAnswer, SchedulerError

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
    text = "; ".join(dict.fromkeys(said)) or "no answer"
    hint = next((hint for word, hint in _HINTS.items() if word in text), None)
    return SchedulerError(f"qsub refused the job: {text}", hint)
