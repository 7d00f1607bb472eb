"""The section ``sge:`` of cluster.yaml, and what a job asks for. Pure.

qsub searches a whole script for directives, so every line is either constant or made of
checked values (``tfcluster.schedulers.script``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tfcluster.base.errors import ConfigError, Problem
from tfcluster.plan.model import Description
from tfcluster.schedulers.base import LauncherCommand, setting
from tfcluster.schedulers.options import (
    ARRAY,
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
from tfcluster.schedulers.script import require_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class SgeSettings:
    """What is requested from Grid Engine."""

    parallel_environment: str | None = setting("word", "qsub -pe: its name.")
    slots: int | None = setting("count", "qsub -pe: how many.")
    queue: str | None = setting("words", "qsub -q.")
    resources: Mapping[str, str] = setting("resources", "qsub -l, name and value.", {})
    options: tuple[str, ...] = setting(
        "options", "More options of qsub, one word per item.", ()
    )


SYNONYMS = {
    "pe": "parallel_environment",
    "parallel_env": "parallel_environment",
    **dict.fromkeys(("nslots", "ntasks", "cores", "processes"), "slots"),
    "q": "queue",
    "partition": "queue",
    **dict.fromkeys(("l", "resource_spec", "resource"), "resources"),
}
_H_RT = 'resources: {h_rt: "4:00:00"}'
_H_VMEM = "resources: {h_vmem: 16G}"
ADVICE = {
    **dict.fromkeys(("time", "walltime", "h_rt", "timeout", "runtime"), _H_RT),
    **dict.fromkeys(("mem", "memory", "h_vmem", "mem_free"), _H_VMEM),
    **dict.fromkeys(("project", "P"), 'options: ["-P", "x"]'),
    "account": 'options: ["-A", "x"]',
}
EXAMPLE = """\
backend: sge                     # `tfcluster launch` submits a job, or uses its own
sge:
  parallel_environment: mpi      # one of `qconf -spl`
  resources: {h_rt: "1:00:00"}   # quoted: YAML reads 1:00:00 as 3600
  # queue: all.q
  # options: ["-P", "x"]

tasks:
  worker: 2                      # rank 0 is worker 0, or a chief
  # ps: 1                        # parameter servers, built in
"""


_KEYS = {"-pe": "parallel_environment", "-q": "queue"}
_RESOURCE = re.compile(r"[A-Za-z0-9_.-]+=[A-Za-z0-9._:+/@%*|!&-]+")
_GPU_RESOURCE = re.compile(r".*(?:gpu|cuda).*", re.IGNORECASE)


def sge_slots(description: Description, sge: SgeSettings) -> int:
    return sge.slots or len(description.task_ids())


def contradictions(description: Description, sge: SgeSettings) -> Iterator[Mistake]:
    """What the section says against the tasks, or twice, or cannot say."""
    tasks = len(description.task_ids())
    for name, value in sge.resources.items():
        if not _RESOURCE.fullmatch(request := f"{name}={value}"):
            message = f"{request!r} is not a resource request"
            yield Mistake(f"sge.resources.{name}", message)
    for index, word in enumerate(sge.options):
        key = _KEYS.get(word)
        if key is not None and getattr(sge, key) is not None:
            yield set_twice("sge", index, word, key)
        number = sge.options[index + 2 :][:1]
        if word == "-pe" and number and number[0].isdecimal():
            yield from _too_few_slots(int(number[0]), tasks, f"sge.options.{index + 2}")
    if sge.slots is not None:
        yield from _too_few_slots(sge.slots, tasks, "sge.slots")
    wanting = [kind for kind, group in description.tasks.items() if group.gpus]
    if wanting and not any(
        map(_GPU_RESOURCE.fullmatch, (*sge.resources, *sge.options))
    ):
        message = "the tasks need GPUs, but the job asks for none"
        hint = "sge: {resources: {gpu: 1}}, under the site's name: `qconf -sc`"
        yield Mistake("sge", message, hint, f"tasks.{wanting[0]}.gpus", fatal=False)


def _too_few_slots(slots: int, tasks: int, key: str) -> Iterator[Mistake]:
    if slots < tasks:
        message = f"{slots} slots are too few for {tasks} tasks"
        hint = "remove it: the number follows from 'tasks'"
        yield Mistake(key, message, hint, "tasks")


_PLAIN = re.compile(r"[A-Za-z0-9_./+@=,:%*|!&-]+")
_PATH = re.compile(r"[A-Za-z0-9_./+@=,%~<>-]+")
"""In a path, ``$`` would begin a qsub variable, and ``:`` would end a host name."""
OPTIONS = OptionTable(
    command="qsub",
    plain=_PLAIN,
    denied={
        "-@": "options come from this file only",
        "-C": "it would change which lines are directives",
        "-S": "the script is written for bash",
        "-V": "other users could see the environment; use 'env:' and 'secrets:'",
        "-b": SCRIPT,
        "-clear": "it would undo the options before it",
        "-e": "standard error goes where standard output goes",
        "-help": NOTHING,
        "-i": "the launcher reads no input",
        "-inherit": "it is for tasks of a job, not for jobs",
        "-j": "standard error goes where standard output goes",
        "-now": FOLLOWS,
        "-o": OUTPUT,
        "-r": "a run is not restarted by the scheduler",
        "-shell": SCRIPT,
        "-sync": FOLLOWS,
        "-t": ARRAY,
        "-tc": "array jobs are not supported",
        "-terse": "tfcluster reads qsub's answer",
        "-v": ENVIRONMENT,
        "-verify": NOTHING,
        "-w": "tfcluster needs qsub to refuse jobs that can never run",
    },
)


def directives(
    description: Description, sge: SgeSettings, launcher: LauncherCommand
) -> Iterator[str]:
    """The lines of the script between its heading and its commands."""
    yield from (f"#$ {line}" for line in _asked(description, sge))
    yield ""
    yield from _fixed(launcher)


def _asked(description: Description, sge: SgeSettings) -> Iterator[str]:
    """The directives for the settings of the Description."""
    yield f"-N {_job_name(description)}"
    slots = sge_slots(description, sge)
    if sge.parallel_environment is not None:
        environment = sge.parallel_environment
        yield f"-pe {_value('sge.parallel_environment', environment)} {slots:d}"
    elif not any(option == "-pe" for option in sge.options):
        raise ConfigError([_missing_environment(description)])
    if sge.queue is not None:
        yield f"-q {_value('sge.queue', sge.queue)}"
    for name, value in sge.resources.items():
        yield f"-l {_value(f'sge.resources.{name}', f'{name}={value}')}"
    yield from lines(sge.options)


def _job_name(description: Description) -> str:
    """The run's name; for Grid Engine it must not begin with a digit."""
    name = _value("name", description.name)
    return f"j{name}" if name[0].isdigit() else name


def _missing_environment(description: Description) -> Problem:
    where = description.origins.get("sge") or description.source
    return Problem(
        where,
        "sge.parallel_environment is not set: without one a job has a single slot",
        "`qconf -spl` lists those of this cluster",
    )


def _fixed(launcher: LauncherCommand) -> Iterator[str]:
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


def _value(where: str, text: str) -> str:
    """``text`` if qsub reads it back from a directive unchanged. Raises ConfigError."""
    if not _PLAIN.fullmatch(require_plain(where, text)):
        problem = f"{text!r} cannot be used in a directive of qsub"
        raise ConfigError([Problem(where, problem)])
    return text
