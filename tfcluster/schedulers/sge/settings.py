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
    BASH,
    ENVIRONMENT,
    FOLLOWS,
    NOTHING,
    OUTPUT,
    RESTART,
    SCRIPT,
    Mistake,
    OptionTable,
    lines,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SgeSettings:
    """What is requested from Grid Engine."""

    parallel_environment: str | None = setting("word", "qsub -pe: its name.")
    slots: int | None = setting("count", "qsub -pe: how many.")
    queue: str | None = setting("words", "qsub -q.", option="-q")
    resources: Mapping[str, str] = setting("resources", "qsub -l, name and value.", {})
    options: tuple[str, ...] = setting(
        "options", "More options of qsub, one word per item.", ()
    )


SYNONYMS = {
    **dict.fromkeys(("pe", "parallel_env"), "parallel_environment"),
    **dict.fromkeys(("nslots", "ntasks", "cores", "processes"), "slots"),
    **dict.fromkeys(("l", "resource_spec", "resource"), "resources"),
}
_H_RT = 'resources: {h_rt: "4:00:00"}'
_H_VMEM = "resources: {h_vmem: 16G}"
ADVICE = {
    **dict.fromkeys(("time", "walltime", "h_rt", "timeout", "runtime"), _H_RT),
    **dict.fromkeys(("mem", "memory", "h_vmem", "mem_free"), _H_VMEM),
    **dict.fromkeys(("project", "p"), 'options: ["-P", "x"]'),
    "account": 'options: ["-A", "x"]',
}
EXAMPLE = """\
backend: sge                     # `tfcluster launch` submits a job, or uses its own
sge:
  parallel_environment: mpi      # one of `qconf -spl`
  resources: {h_rt: "1:00:00"}   # quoted: YAML reads 1:00:00 as 3600
  # queue: all.q
  # options: ["-P", "x"]
"""


_RESOURCE = re.compile(r"[A-Za-z0-9_.-]+=[A-Za-z0-9._:+/@%*|!&-]+")
_GPU_RESOURCE = re.compile(r".*(?:gpu|cuda).*", re.IGNORECASE)
_PLAIN = re.compile(r"[A-Za-z0-9_./+@=,:%*|!&-]+")
_PATH = re.compile(r"[A-Za-z0-9_./+@=,%~<>-]+")
"""In a path, ``$`` would begin a qsub variable, and ``:`` would end a host name."""
OPTIONS = OptionTable(
    command="qsub",
    plain=_PLAIN,
    denied={
        "-@": "options come from this file only",
        "-C": "it would change which lines are directives",
        "-S": BASH,
        "-V": ENVIRONMENT,
        "-v": ENVIRONMENT,
        "-b": SCRIPT,
        "-clear": "it would undo the options before it",
        **dict.fromkeys(("-e", "-j", "-o"), OUTPUT),
        **dict.fromkeys(("-help", "-verify"), NOTHING),
        "-i": "the launcher reads no input",
        "-inherit": "it is for tasks of a job, not for jobs",
        **dict.fromkeys(("-now", "-sync"), FOLLOWS),
        "-pe": "'parallel_environment' and 'slots' set it",
        "-r": RESTART,
        "-shell": SCRIPT,
        **dict.fromkeys(("-t", "-tc"), ARRAY),
        "-terse": "tfcluster reads qsub's answer",
        "-w": "tfcluster needs qsub to refuse jobs that can never run",
    },
)


def sge_slots(description: Description, sge: SgeSettings) -> int:
    return sge.slots or len(description.task_ids())


def contradictions(description: Description, sge: SgeSettings) -> Iterator[Mistake]:
    """What the section says against the tasks, or cannot say."""
    tasks = len(description.task_ids())
    for name, value in sge.resources.items():
        if not _RESOURCE.fullmatch(request := f"{name}={value}"):
            message = f"{request!r} is not a resource request"
            yield Mistake(f"sge.resources.{name}", message)
    if sge.slots is not None and sge.slots < tasks:
        message = f"{sge.slots} slots are too few for {tasks} tasks"
        hint = "remove it: the number follows from 'tasks'"
        yield Mistake("sge.slots", message, hint, "tasks")
    needing = [kind for kind, group in description.tasks.items() if group.gpus]
    requests = (*sge.resources, *sge.options)
    if needing and not any(map(_GPU_RESOURCE.fullmatch, requests)):
        message = "the tasks need GPUs, but the job asks for none"
        hint = "sge: {resources: {gpu: 1}}, under the site's name: `qconf -sc`"
        yield Mistake("sge", message, hint, f"tasks.{needing[0]}.gpus", fatal=False)


def directives(
    description: Description, sge: SgeSettings, launcher: LauncherCommand
) -> Iterator[str]:
    """The lines of the script between its heading and its commands."""
    yield from (f"#$ {line}" for line in _requests(description, sge))
    yield ""
    yield "#$ -S /bin/bash"
    yield "# The launcher's output; task output is in the folder logs."
    yield f"#$ -o {_log(launcher)}"
    yield "#$ -j y"
    yield "# A warning signal to the launcher before the job is killed."
    yield "#$ -notify"
    yield "# A lost host ends the run; it is not restarted silently."
    yield "#$ -r n"


def _requests(description: Description, sge: SgeSettings) -> Iterator[str]:
    name = description.name
    if not _PLAIN.fullmatch(name):
        problem = f"{name!r} cannot be used in a directive of qsub"
        raise ConfigError([Problem("name", problem)])
    # For Grid Engine, a name must not begin with a digit.
    yield f"-N j{name}" if name[0].isdigit() else f"-N {name}"
    if sge.parallel_environment is None:
        raise ConfigError(
            [
                Problem(
                    description.origins.get("sge") or description.source,
                    "sge.parallel_environment is not set: without one a job has a "
                    "single slot",
                    "`qconf -spl` lists those of this cluster",
                )
            ]
        )
    yield f"-pe {sge.parallel_environment} {sge_slots(description, sge)}"
    if sge.queue is not None:
        yield f"-q {sge.queue}"
    yield from (f"-l {name}={value}" for name, value in sge.resources.items())
    yield from lines(sge.options)


def _log(launcher: LauncherCommand) -> str:
    log = str(launcher.log)
    if not _PATH.fullmatch(log):
        hint = (
            "set TFCLUSTER_STATE_DIR to a path of letters, digits and . _ + @ = , % ~ "
            "/ -"
        )
        message = f"qsub does not accept the path {log!r}"
        raise ConfigError([Problem("state folder", message, hint)])
    return log
