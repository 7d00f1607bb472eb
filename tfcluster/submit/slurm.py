"""Slurm: renders sbatch scripts, and parses the answers of its commands. Pure.

sbatch(1), squeue(1), scontrol(1), scancel(1). Directives are made only from checked
values; the script's commands are constant (``script.body``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import ceil
from pathlib import Path

from tfcluster.errors import ConfigError, Problem
from tfcluster.model import Description
from tfcluster.scheduler_request import SLURM_KEYS, slurm_options, slurm_request
from tfcluster.submit.scheduler import (
    Answer,
    JobPhase,
    JobState,
    Launcher,
    SchedulerError,
)
from tfcluster.submit.script import body, heading, require_plain

WARNING_S = 60
"""The launcher is warned at least this long before the time limit."""
_MAX_TIME = 100
"""The limit in characters: a longer text is not a time."""
_SWEEP_S = 20
"""How long the end of a run may take beyond the grace period of its tasks."""
_RESULTS_S = 60
"""How long results may take to come back before the job is requeued."""

_PLAIN = re.compile(r"[A-Za-z0-9_./+@=,:%*-]+")
_OPTION = re.compile(r"--[a-z][a-z0-9-]*(?:=.*)?|-[A-Za-z].*", re.DOTALL)
_DENIED = {
    "--wrap": "the script defines what runs",
    "--uid": "a job runs as the user who submits it",
    "--gid": "a job runs as the user who submits it",
    "--parsable": "tfcluster reads sbatch's answer",
    "--wait": "tfcluster follows the job itself",
    "--test-only": "nothing would be submitted",
    "--chdir": "'workdir' sets where tasks run",
    "--help": "nothing would be submitted",
    "--usage": "nothing would be submitted",
    "--version": "nothing would be submitted",
    "--array": "every element would be the same run; start one run for each",
    "--clusters": "the run's record could not be found there",
}
_DENIED_LETTERS = {"W": "--wait", "D": "--chdir", "h": "--help", "V": "--version"} | {
    "a": "--array",
    "M": "--clusters",
}

_JOB_ID = re.compile(r"([0-9]+)(?:;[A-Za-z0-9_.-]+)?")
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
_PENDING = ("PENDING", "CONFIGURING", "REQUEUE", "RESV_DEL_HOLD", "SPECIAL_EXIT")

_REASONS = {
    "Resources": "waits until enough nodes are free",
    "Priority": "jobs of higher priority come first",
    "BeginTime": "its start time has not been reached",
    "Dependency": "waits for another job",
    "JobHeldUser": "held by its owner; `scontrol release` releases it",
    "JobHeldAdmin": "held by an administrator",
    "Licenses": "waits for a licence",
    "NodeDown": "a node that it needs is down",
    "PartitionConfig": "the partition cannot satisfy its request",
    "PartitionNodeLimit": "it asks for more nodes than the partition has or allows",
    "PartitionTimeLimit": "it asks for more time than the partition allows",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "ReqNodeNotAvail": "a node that it needs is not available",
    "BadConstraints": "no nodes match its request",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its quality of service is not valid",
    "AssocMaxJobsLimit": "you have reached your account's limit of jobs",
    "JobLaunchFailure": "it could not be started on its node",
    "launch failed requeued held": "it could not be started on its node",
    "None": None,
    "": None,
}


class SlurmScheduler:
    """See ``Scheduler``."""

    name = "Slurm"

    def is_inside(self, environ: Mapping[str, str]) -> bool:
        from tfcluster.backends.slurm.variables import is_inside

        return is_inside(environ)

    def render(self, description: Description, launcher: Launcher) -> str:
        asked = [f"#SBATCH {line}" for line in _asked(description)]
        fixed = _fixed(description, launcher)
        lines = ["#!/bin/bash", *heading(description), "", *asked, "", *fixed, ""]
        return "\n".join([*lines, *body(launcher), ""])

    def submit_argv(self, script: Path) -> tuple[str, ...]:
        return ("sbatch", "--parsable", str(script))

    def parse_job_id(self, answer: Answer) -> str:
        lines = answer.stdout.split()
        match = _JOB_ID.fullmatch(lines[-1]) if lines else None
        if answer.exit_code != 0 or match is None:
            raise _refusal(answer)
        return match[1]

    def state_argv(self, job: str) -> tuple[str, ...]:
        return ("squeue", "--noheader", "--states=all", f"--jobs={job}", "-o", "%T|%r")

    def parse_state(self, job: str, answer: Answer) -> JobState:
        if answer.exit_code != 0:
            if "Invalid job id" in answer.stderr:
                return JobState(JobPhase.GONE, "gone")
            raise SchedulerError(_own_words(answer) or "squeue failed")
        lines = answer.stdout.split("\n")
        word, _, reason = lines[0].strip().partition("|")
        if not word:
            return JobState(JobPhase.GONE, "gone")
        return JobState(_phase(word), word, _reason(reason.strip()))

    def accounting_argv(self, job: str) -> tuple[str, ...] | None:
        return None  # squeue also knows jobs that are over

    def parse_accounting(self, answer: Answer) -> str | None:
        return None

    def cancel_argvs(self, job: str, *, now: bool) -> tuple[tuple[str, ...], ...]:
        if now:
            return (("scancel", "--quiet", job),)
        # The launcher replaces the batch shell (exec), so the signal reaches it.
        return (
            ("scancel", "--quiet", "--state=PENDING", job),
            ("scancel", "--quiet", "--batch", "--signal=INT", job),
        )


def _asked(description: Description) -> Iterator[str]:
    """The directives for the settings of the Description."""
    slurm, asked = description.slurm, slurm_request(description)
    given = slurm_options(slurm)
    yield f"--job-name={_value('name', description.name)}"
    size = {
        "--nodes": asked.nodes,
        "--ntasks": asked.tasks,
        "--ntasks-per-node": asked.tasks_per_node,
        "--gpus-per-node": asked.gpus_per_node,
        "--gpus-per-task": asked.gpus_per_task,
    }
    for option in dict.fromkeys((*size, *SLURM_KEYS)):
        key = SLURM_KEYS.get(option, "")
        value = size[option] if option in size else getattr(slurm, key)
        if value is not None and option not in given:
            yield f"{option}={_value(f'slurm.{key}', str(value))}"
    for index, option in enumerate(slurm.options):
        yield _option(index, option, description)


def _fixed(description: Description, launcher: Launcher) -> Iterator[str]:
    """The directives that every job has, unless its options set them."""
    options = description.slurm.options
    if not _given(options, "--export"):
        yield "# Pass nothing from the submitting shell; use 'env:' and 'secrets:'."
        yield "#SBATCH --export=NONE"
    if not _given(options, "--signal"):
        yield "# A warning signal to the launcher, which ends the run with code 124."
        yield f"#SBATCH --signal=B:USR1@{_warning_s(description)}"
    if not _given(options, "--output", "o"):
        yield "# The launcher's output; task output is in the folder logs."
        log = str(launcher.log).replace("%", "%%")
        yield f"#SBATCH --output={_value('state folder', log)}"
    yield "#SBATCH --open-mode=append"
    if description.restart.requeues:
        yield "# After the time limit the launcher asks Slurm to start the job again."
        yield "#SBATCH --requeue"


def _warning_s(description: Description) -> int:
    """The seconds that an orderly end needs, but at most a quarter of a short limit."""
    wanted = max(WARNING_S, ceil(description.grace_s) + _SWEEP_S)
    if description.restart.requeues and description.results is not None:
        wanted += _RESULTS_S
    limit_s = None
    if description.slurm.time is not None:
        limit_s = seconds(description.slurm.time)
    return wanted if limit_s is None else min(wanted, max(10, limit_s // 4))


def seconds(time: str) -> int | None:
    """Parse a time: ``90`` (minutes), ``H:MM:SS``, ``D-HH``; None: unlimited."""
    if len(time) > _MAX_TIME:
        return None
    days, dash, rest = time.rpartition("-")
    words = rest.split(":")
    if not all(word.isdecimal() for word in words):
        return None
    numbers = [int(word) for word in words]
    if dash:
        hours, minutes, rest_s = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, rest_s = numbers
    else:
        hours, (minutes, rest_s) = 0, (*numbers, 0)[:2]
    whole = int(days) if days.isdecimal() else 0
    return ((whole * 24 + hours) * 60 + minutes) * 60 + rest_s


def _value(where: str, text: str) -> str:
    """``text``, quoted for an sbatch directive if needed. Raises ConfigError."""
    require_plain(where, text)
    if _PLAIN.fullmatch(text):
        return text
    if '"' in text or "\\" in text:
        problem = f"{text!r} cannot be used in a directive of sbatch"
        raise ConfigError([Problem(where, problem)])
    return f'"{text}"'


def _option(index: int, option: str, description: Description) -> str:
    key = f"slurm.options.{index}"
    where = description.origins.get(key) or description.origins.get(
        "slurm.options", "slurm.options"
    )
    require_plain(where, option)
    name, equals, value = option.partition("=")
    if not _OPTION.fullmatch(option):
        hint = "one item for each, like --account=x or -Ax"
        raise ConfigError([Problem(where, f"{option!r} is not an option", hint)])
    if why := _denial(name):
        raise ConfigError([Problem(where, f"option {name} is not allowed", why)])
    if not equals:
        return _value(where, option)
    return f"{name}={_value(where, value)}"


def _denial(name: str) -> str | None:
    """Why an option is refused. getopt accepts any prefix of a long name."""
    if not name.startswith("--"):
        long = _DENIED_LETTERS.get(name[1:2])
        return None if long is None else _DENIED[long]
    for denied, why in _DENIED.items():
        if denied == name or (len(name) > 3 and denied.startswith(name)):
            return why
    return None


def _given(options: tuple[str, ...], long: str, letter: str = "") -> bool:
    return any(
        option.partition("=")[0] == long
        or (bool(letter) and option.startswith(f"-{letter}"))
        for option in options
    )


def _phase(word: str) -> JobPhase:
    if word.startswith(_PENDING):
        return JobPhase.PENDING
    return JobPhase.RUNNING if word.startswith(_RUNNING) else JobPhase.OVER


def _reason(text: str) -> str | None:
    """``(Resources)`` with its meaning."""
    known = text.strip("()")
    meaning = _REASONS.get(known.split(",")[0], "")
    if meaning is None:
        return None
    return f"{known}: {meaning}" if meaning else known


def _refusal(answer: Answer) -> SchedulerError:
    said = _own_words(answer)
    hints = {
        "Invalid partition": "`sinfo` lists the partitions",
        "Invalid account": "slurm: {account: ...}",
        "node configuration is not available": "`sinfo -N -l` shows what nodes have",
        "time limit": "slurm: {time: ...}",
        "contact slurm controller": "`scontrol ping` checks it",
        "configuration source": "is this a login node of the cluster?",
    }
    hint = next((text for word, text in hints.items() if word in said), None)
    return SchedulerError(f"sbatch refused the job: {said or 'no answer'}", hint)


def _own_words(answer: Answer) -> str:
    """Slurm's message in one line, without the names of its commands."""
    lines = [
        re.sub(r"^[a-z]+: (?:error: |fatal: )?", "", line.strip())
        for line in answer.stderr.splitlines()
        if line.strip()
    ]
    return "; ".join(dict.fromkeys(lines))


SCHEDULER = SlurmScheduler()
