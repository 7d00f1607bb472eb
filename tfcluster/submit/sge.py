"""Grid Engine: renders qsub scripts, and parses the answers of its commands. Pure.

qsub(1), qstat(1), qdel(1). qsub searches a whole script for directives, so every line
is either constant or made of checked values (``script.body``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tfcluster.errors import ConfigError, Problem
from tfcluster.model import Description
from tfcluster.scheduler_request import sge_slots
from tfcluster.submit.scheduler import Answer, JobState, Launcher, SchedulerError
from tfcluster.submit.script import body, heading, require_plain
from tfcluster.submit.sge_accounting import verdict
from tfcluster.submit.sge_state import job_state

_PLAIN = re.compile(r"[A-Za-z0-9_./+@=,:%*|!&-]+")
_PATH = re.compile(r"[A-Za-z0-9_./+@=,%~<>-]+")
"""In a path, ``$`` would begin a qsub variable, and ``:`` would end a host name."""
_RESOURCE = re.compile(r"[A-Za-z0-9_.-]+=[A-Za-z0-9._:+/@%*|!&-]+")

_DENIED = {
    "-@": "options come from this file only",
    "-C": "it would change which lines are directives",
    "-S": "the script is written for bash",
    "-V": "other users could see the environment; use 'env:' and 'secrets:'",
    "-b": "tfcluster submits a script",
    "-clear": "it would undo the options before it",
    "-e": "standard error goes where standard output goes",
    "-help": "nothing would be submitted",
    "-i": "the launcher reads no input",
    "-inherit": "it is for tasks of a job, not for jobs",
    "-j": "standard error goes where standard output goes",
    "-now": "tfcluster follows the job itself",
    "-o": "the launcher's output goes to the run's folder",
    "-r": "a run is not restarted by the scheduler",
    "-shell": "tfcluster submits a script",
    "-sync": "tfcluster follows the job itself",
    "-t": "every element would be the same run; start one run for each",
    "-tc": "array jobs are not supported",
    "-terse": "tfcluster reads qsub's answer",
    "-v": "other users could see the values; use 'env:' and 'secrets:'",
    "-verify": "nothing would be submitted",
    "-w": "tfcluster needs qsub to refuse jobs that can never run",
}

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


class SgeScheduler:
    """See ``Scheduler``."""

    name = "Grid Engine"

    def is_inside(self, environ: Mapping[str, str]) -> bool:
        from tfcluster.backends.sge.job import is_inside

        return is_inside(environ)

    def render(self, description: Description, launcher: Launcher) -> str:
        asked = [f"#$ {line}" for line in _asked(description)]
        lines = ["#!/bin/bash", *heading(description), "", *asked, ""]
        return "\n".join([*lines, *_fixed(launcher), "", *body(launcher), ""])

    def submit_argv(self, script: Path) -> tuple[str, ...]:
        return ("qsub", "-terse", str(script))

    def parse_job_id(self, answer: Answer) -> str:
        """The last line that is an id: prologs and JSVs may print lines before it."""
        if answer.exit_code == 0:
            for line in reversed(answer.stdout.splitlines()):
                match = _JOB_ID.fullmatch(line.strip()) or _NUMBER_IN_ANSWER.match(
                    line.strip()
                )
                if match is not None:
                    return match[1]
        raise _refusal(answer)

    def state_argv(self, job: str) -> tuple[str, ...]:
        return ("qstat", "-j", job, "-xml")

    def parse_state(self, job: str, answer: Answer) -> JobState:
        return job_state(job, answer)

    def accounting_argv(self, job: str) -> tuple[str, ...] | None:
        return ("qacct", "-j", job)

    def parse_accounting(self, answer: Answer) -> str | None:
        return verdict(answer.stdout)

    def cancel_argvs(self, job: str, *, now: bool) -> tuple[tuple[str, ...], ...]:
        # With -notify, the launcher gets SIGUSR2 first. There is no faster way: a job
        # that is being deleted gets no further signal.
        return (("qdel", job),)


def _asked(description: Description) -> Iterator[str]:
    """The directives for the settings of the Description."""
    sge = description.sge
    yield f"-N {_job_name(description)}"
    slots = sge_slots(description)
    if sge.parallel_environment is not None:
        environment = sge.parallel_environment
        yield f"-pe {_value('sge.parallel_environment', environment)} {slots:d}"
    elif not any(option == "-pe" for option in sge.options):
        raise ConfigError([_missing_environment(description)])
    if sge.queue is not None:
        yield f"-q {_value('sge.queue', sge.queue)}"
    for name, value in sge.resources.items():
        where = _origin(description, f"sge.resources.{name}", "sge.resources")
        request = f"{name}={value}"
        if not _RESOURCE.fullmatch(require_plain(where, request)):
            raise ConfigError(
                [Problem(where, f"{request!r} is not a resource request")]
            )
        yield f"-l {request}"
    yield from _options(description)


def _job_name(description: Description) -> str:
    """The run's name; for Grid Engine it must not begin with a digit."""
    name = _value("name", description.name)
    return f"j{name}" if name[0].isdigit() else name


def _missing_environment(description: Description) -> Problem:
    where = _origin(description, "sge", description.source)
    return Problem(
        where,
        "sge.parallel_environment is not set: without one a job has a single slot",
        "`qconf -spl` lists those of this cluster",
    )


def _fixed(launcher: Launcher) -> Iterator[str]:
    """The directives that every job has."""
    log = str(launcher.log)
    require_plain("state folder", log)
    if not _PATH.fullmatch(log):
        raise ConfigError(
            [
                Problem(
                    "state folder",
                    f"qsub does not accept the path {log!r}",
                    "set TFCLUSTER_STATE_DIR to a path of letters, digits and . _ + @ "
                    "= , % ~ / -",
                )
            ]
        )
    yield "#$ -S /bin/bash"
    yield "# The launcher's output; task output is in the folder logs."
    yield f"#$ -o {log}"
    yield "#$ -j y"
    yield "# A warning signal to the launcher before the job is killed."
    yield "#$ -notify"
    yield "# A lost host ends the run; it is not restarted silently."
    yield "#$ -r n"


def _options(description: Description) -> Iterator[str]:
    """``sge.options`` as directives: a word with ``-`` begins one; values follow it."""
    lines: list[list[str]] = []
    for index, word in enumerate(description.sge.options):
        where = _origin(description, f"sge.options.{index}", "sge.options")
        if re.fullmatch(r"-[A-Za-z@]\w*", word):
            if why := _DENIED.get(word):
                problem = Problem(where, f"option {word} is not allowed", why)
                raise ConfigError([problem])
            lines.append([word])
        elif not lines or re.match(r"-(?![0-9])", word):
            hint = "one word per item: -P, project"
            raise ConfigError([Problem(where, f"{word!r} is not an option", hint)])
        else:
            lines[-1].append(_value(where, word))
    yield from (" ".join(line) for line in lines)


def _value(where: str, text: str) -> str:
    """``text`` if qsub reads it back from a directive unchanged. Raises ConfigError."""
    if not _PLAIN.fullmatch(require_plain(where, text)):
        problem = f"{text!r} cannot be used in a directive of qsub"
        raise ConfigError([Problem(where, problem)])
    return text


def _origin(description: Description, key: str, otherwise: str) -> str:
    found = description.origins.get(key) or description.origins.get(otherwise)
    return found or otherwise


def _refusal(answer: Answer) -> SchedulerError:
    """``Unable to run job: REASON`` and ``Exiting.``, on either stream."""
    said = [
        re.sub(r"^(?:Unable to run job|error|denied): ", "", line.strip())
        for line in (answer.stderr + "\n" + answer.stdout).splitlines()
        if line.strip() and line.strip() != "Exiting."
    ]
    text = "; ".join(dict.fromkeys(said)) or "no answer"
    hint = next((hint for word, hint in _HINTS.items() if word in text), None)
    return SchedulerError(f"qsub refused the job: {text}", hint)


SCHEDULER = SgeScheduler()
