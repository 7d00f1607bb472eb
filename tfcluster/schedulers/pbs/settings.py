"""The section ``pbs:`` of cluster.yaml, and what a job asks of PBS for it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tfcluster.base.durations import clock, time_limit_s
from tfcluster.plan.model import Description
from tfcluster.schedulers.base import LauncherCommand, setting
from tfcluster.schedulers.options import (
    ARRAY,
    ENVIRONMENT,
    FOLLOWS,
    OUTPUT,
    SCRIPT,
    Mistake,
    OptionTable,
    lines,
    set_twice,
)
from tfcluster.schedulers.script import into_log


@dataclass(frozen=True, slots=True, kw_only=True)
class PbsSettings:
    """What is requested from PBS. The number of tasks follows from `tasks`."""

    nodes: int | None = setting("count", "Chunks of -l select, each on its own host.")
    tasks_per_node: int | None = setting("count", "At most this many tasks on each.")
    cpus_per_task: int | None = setting("count", "ncpus for each task.")
    mem: str | None = setting("memory", "mem of each chunk, as 16G.")
    gpus_per_node: int | None = setting(
        "gpus", "ngpus of each chunk. Default: what `gpus` of the tasks needs."
    )
    queue: str | None = setting("word", "qsub -q.")
    account: str | None = setting("word", "qsub -A.")
    time: str | None = setting("time", 'walltime: as 4h, or "HH:MM:SS".')
    options: tuple[str, ...] = setting(
        "options", "More options of qsub, one word per item.", ()
    )


SYNONYMS = {
    **dict.fromkeys(("select", "chunks"), "nodes"),
    **dict.fromkeys(("walltime", "time_limit", "timeout"), "time"),
    **dict.fromkeys(("memory", "mem_gb"), "mem"),
    **dict.fromkeys(("cores", "cpus", "ncpus", "ppn"), "cpus_per_task"),
    **dict.fromkeys(("mpiprocs", "processes_per_node"), "tasks_per_node"),
    "ngpus": "gpus_per_node",
    "q": "queue",
}
ADVICE = {
    "project": 'options: ["-P", "x"]',
    "resource_spec": 'options: ["-l", "select=..."]',
}
EXAMPLE = """\
backend: pbs                     # `tfcluster launch` submits a job, or uses its own
pbs:
  nodes: 2                       # the tasks below are divided among them
  time: 1h
  # mem: 16G                     # of each node
  # cpus_per_task: 8
  # queue: workq
  # account: x
  # options: ["-l", "place=excl"]  # any other options of qsub

tasks:
  worker: 2                      # rank 0 is worker 0, or a chief
  # worker: {count: 8, gpus: 1}  # the job asks for these GPUs
  # ps: 1                        # parameter servers, built in
"""
OPTIONS = OptionTable(
    command="qsub",
    short=True,
    plain=re.compile(r"[A-Za-z0-9_./+@=,:%*-]+"),
    denied={
        "-J": ARRAY,
        "-t": ARRAY,
        "-C": "it would change which lines are directives",
        "-I": FOLLOWS,
        "-X": FOLLOWS,
        "-S": "the script is written for bash",
        "-V": ENVIRONMENT,
        "-v": ENVIRONMENT,
        "-d": "'workdir' sets where tasks run",
        "-D": "'workdir' sets where tasks run",
        "-e": OUTPUT,
        "-j": OUTPUT,
        "-k": OUTPUT,
        "-o": OUTPUT,
        "-R": OUTPUT,
        "-f": FOLLOWS,
        "-r": "a run is not restarted by the scheduler",
        "-u": "a job runs as the user who submits it",
        "-z": "tfcluster reads qsub's answer",
        "-x": SCRIPT,
        "--": SCRIPT,
    },
)
_SIZES = ("select=", "nodes=")
_KEYS = {"-q": "queue", "-A": "account"}


def chunks(description: Description, pbs: PbsSettings) -> tuple[int, int]:
    """How many chunks the job asks for, and how many tasks fit on each."""
    tasks = len(description.task_ids())
    if pbs.nodes is not None:
        return pbs.nodes, pbs.tasks_per_node or -(-tasks // pbs.nodes)
    each = pbs.tasks_per_node or 1
    return -(-tasks // each), each


def gpus_of_chunk(description: Description, pbs: PbsSettings, each: int) -> int:
    if pbs.gpus_per_node is not None:
        return pbs.gpus_per_node
    return each * max(group.gpus or 0 for group in description.tasks.values())


def directives(
    description: Description, pbs: PbsSettings, launcher: LauncherCommand
) -> Iterator[str]:
    # A name begins with a letter, and older versions allow 15 characters.
    name = description.name if description.name[0].isalpha() else f"j{description.name}"
    yield f"#PBS -N {name[:15]}"
    if not any(word.removeprefix("-l").startswith(_SIZES) for word in pbs.options):
        count, each = chunks(description, pbs)
        select = f"select={count}:ncpus={each * (pbs.cpus_per_task or 1)}"
        select += f":mpiprocs={each}"
        if pbs.mem is not None:
            select += f":mem={_memory(pbs.mem)}"
        if gpus := gpus_of_chunk(description, pbs, each):
            select += f":ngpus={gpus}"
        yield f"#PBS -l {select}"
        placed = any(word.startswith(("place=", "-lplace=")) for word in pbs.options)
        if pbs.nodes is not None and not placed:
            yield "#PBS -l place=scatter"
    limit_s = None if pbs.time is None else time_limit_s(pbs.time)
    if limit_s is not None:
        yield f"#PBS -l walltime={clock(limit_s)}"
    if pbs.queue is not None:
        yield f"#PBS -q {pbs.queue}"
    if pbs.account is not None:
        yield f"#PBS -A {pbs.account}"
    yield from (f"#PBS {line}" for line in lines(pbs.options))
    yield ""
    yield "#PBS -S /bin/bash"
    yield "# PBS would copy the output only at the end."
    yield "#PBS -j oe"
    yield "#PBS -o /dev/null"
    yield "# A lost host ends the run; it is not restarted silently."
    yield "#PBS -r n"
    yield ""
    yield from into_log(launcher)


def mistakes(description: Description, pbs: PbsSettings) -> Iterator[Mistake]:
    """What the section says against the tasks, or twice."""
    tasks = len(description.task_ids())
    for index, word in enumerate(pbs.options):
        key = f"pbs.options.{index}"
        if (name := _KEYS.get(word[:2])) and getattr(pbs, name) is not None:
            yield set_twice("pbs", index, word[:2], name)
        if word.startswith(("block=", "-Wblock=")):
            yield Mistake(key, "option -W block is not allowed", FOLLOWS)
        size = word.removeprefix("-l").startswith(_SIZES)
        if size and (pbs.nodes or pbs.tasks_per_node):
            yield Mistake(
                key, "the size is also set by 'pbs'", "keep one of them", "pbs"
            )
    count, each = chunks(description, pbs)
    if pbs.nodes is not None and pbs.nodes > tasks:
        message = f"{pbs.nodes} nodes are too many for {tasks} tasks"
        yield Mistake("pbs.nodes", message, f"nodes: {tasks}", "tasks")
    elif count * each < tasks:
        message = f"{count} nodes with {each} tasks each are too few for {tasks} tasks"
        yield Mistake("pbs.tasks_per_node", message, "omit it", "tasks")


def _memory(text: str) -> str:
    """``16G`` as PBS writes it: 16gb; a plain number is in MB."""
    return f"{text}mb" if text.isdecimal() else f"{text.lower()}b"
