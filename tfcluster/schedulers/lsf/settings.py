"""The section ``lsf:`` of cluster.yaml, and what a job asks of LSF for it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from tfcluster.base.durations import time_limit_s
from tfcluster.plan.model import Description
from tfcluster.schedulers.base import LauncherCommand, gpus_of_all, setting
from tfcluster.schedulers.options import (
    ENVIRONMENT,
    FOLLOWS,
    NOTHING,
    OUTPUT,
    SCRIPT,
    Mistake,
    OptionTable,
    lines,
    set_twice,
)
from tfcluster.schedulers.script import into_log


@dataclass(frozen=True, slots=True, kw_only=True)
class LsfSettings:
    """What is requested from LSF. The number of slots follows from `tasks`."""

    tasks_per_node: int | None = setting("count", "span[ptile=N]: tasks on each host.")
    mem: str | None = setting("memory", "rusage[mem=...], as 16G.")
    gpus_per_node: int | None = setting(
        "gpus", "bsub -gpu num=N. Default: what `gpus` of the tasks needs."
    )
    queue: str | None = setting("word", "bsub -q.")
    project: str | None = setting("word", "bsub -P.")
    time: str | None = setting("time", 'bsub -W: as 4h, or "HH:MM:SS".')
    options: tuple[str, ...] = setting(
        "options", "More options of bsub, one word per item.", ()
    )


SYNONYMS = {
    **dict.fromkeys(("walltime", "time_limit", "timeout", "W"), "time"),
    **dict.fromkeys(("memory", "mem_gb"), "mem"),
    **dict.fromkeys(("ptile", "processes_per_node"), "tasks_per_node"),
    "q": "queue",
    "account": "project",
    "P": "project",
}
ADVICE = {
    **dict.fromkeys(("nodes", "hosts"), "tasks_per_node: N; LSF then chooses hosts"),
    **dict.fromkeys(("R", "resources"), 'options: ["-R", "select[type==any]"]'),
}
EXAMPLE = """\
backend: lsf                     # `tfcluster launch` submits a job, or uses its own
lsf:
  tasks_per_node: 1              # otherwise LSF fills one host after the other
  time: 1h
  # mem: 16G
  # queue: normal
  # project: x
  # options: ["-R", "select[mem>64000]"]  # any other options of bsub

tasks:
  worker: 2                      # rank 0 is worker 0, or a chief
  # worker: {count: 8, gpus: 1}  # the job asks for these GPUs
  # ps: 1                        # parameter servers, built in
"""
_PLAIN = re.compile(r"[A-Za-z0-9_./+@=,:%-]+")
OPTIONS = OptionTable(
    command="bsub",
    plain=re.compile(r"[A-Za-z0-9_./+@=,:%*<>&|!()\[\] -]+"),
    denied={
        "-J": "the name is the run's, and every element of an array the same run",
        "-K": FOLLOWS,
        **dict.fromkeys(("-I", "-Ip", "-Is", "-IS", "-ISp", "-ISs", "-IX"), FOLLOWS),
        **dict.fromkeys(("-o", "-oo", "-e", "-eo", "-tty"), OUTPUT),
        **dict.fromkeys(("-i", "-is"), "the launcher reads no input"),
        "-env": ENVIRONMENT,
        "-L": "the script is written for bash",
        "-cwd": "'workdir' sets where tasks run",
        **dict.fromkeys(("-json", "-yaml", "-jsdl", "-pack", "-Zs"), SCRIPT),
        "-n": "the number of slots follows from 'tasks'",
        "-r": "a run is not restarted by the scheduler",
        "-Q": "a run is not restarted by the scheduler",
        "-user": "a job runs as the user who submits it",
        **dict.fromkeys(("-h", "-V"), NOTHING),
    },
)
_KEYS = {"-q": "queue", "-P": "project", "-W": "time", "-gpu": "gpus_per_node"}
_SWEEP_S = 20


def gpus_of_host(description: Description, lsf: LsfSettings) -> int:
    """How many GPUs each host needs: for as many tasks as it may get."""
    if lsf.gpus_per_node is not None:
        return lsf.gpus_per_node
    each = lsf.tasks_per_node or len(description.task_ids())
    most = max(group.gpus or 0 for group in description.tasks.values())
    return min(gpus_of_all(description) or 0, each * most)


def directives(
    description: Description, lsf: LsfSettings, launcher: LauncherCommand
) -> Iterator[str]:
    yield f"#BSUB -J {_quoted(description.name)}"
    yield f"#BSUB -n {len(description.task_ids())}"
    if lsf.tasks_per_node is not None:
        yield f'#BSUB -R "span[ptile={lsf.tasks_per_node}]"'
    if lsf.mem is not None:
        yield f'#BSUB -R "rusage[mem={lsf.mem}]"'
    if "-gpu" not in lsf.options and (gpus := gpus_of_host(description, lsf)):
        yield f'#BSUB -gpu "num={gpus}"'
    if lsf.queue is not None:
        yield f"#BSUB -q {lsf.queue}"
    if lsf.project is not None:
        yield f"#BSUB -P {lsf.project}"
    yield from _limit(description, lsf)
    yield from (f"#BSUB {line}" for line in lines(lsf.options, _quoted))
    yield ""
    yield "# Pass nothing from the submitting shell; use 'env:' and 'secrets:'."
    yield '#BSUB -env "none"'
    yield "#BSUB -L /bin/bash"
    yield "# LSF would copy the output only at the end."
    yield "#BSUB -o /dev/null"
    yield "# A lost host ends the run; it is not restarted silently."
    yield "#BSUB -rn"
    yield ""
    yield from into_log(launcher)


def _limit(description: Description, lsf: LsfSettings) -> Iterator[str]:
    limit_s = None if lsf.time is None else time_limit_s(lsf.time)
    if limit_s is None:
        return
    minutes = ceil(limit_s / 60)
    yield f"#BSUB -W {minutes // 60}:{minutes % 60:02}"
    warning = ceil((description.grace_s + _SWEEP_S) / 60)
    if warning < minutes:
        yield "# A warning signal to the launcher, which ends the run with code 124."
        yield "#BSUB -wa USR1"
        yield f"#BSUB -wt {warning}"


def mistakes(description: Description, lsf: LsfSettings) -> Iterator[Mistake]:
    """What the section says twice."""
    for index, word in enumerate(lsf.options):
        if (name := _KEYS.get(word)) and getattr(lsf, name) is not None:
            yield set_twice("lsf", index, word, name)
    tasks, each = len(description.task_ids()), lsf.tasks_per_node
    if each is not None and each > tasks:
        message = f"{each} tasks on each host are more than {tasks}"
        yield Mistake("lsf.tasks_per_node", message, "omit it", "tasks")


def _quoted(word: str) -> str:
    return word if _PLAIN.fullmatch(word) else f'"{word}"'
