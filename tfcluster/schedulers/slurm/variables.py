"""Reads a Slurm job's hosts from its environment variables. Pure.

These are the output variables of sbatch(1), salloc(1) and srun(1). Everything keeps the
order of the node list; nothing is sorted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tfcluster.base.errors import ConfigError, Problem, StartError
from tfcluster.base.light_dataclasses import dataclass
from tfcluster.plan.host_patterns import HostlistError, expand, fold, host_name_problem

# sbatch(1), SLURM_TASKS_PER_NODE: "2(x3),1" is 2, 2, 2 and 1.
_COUNTS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_INTERACTIVE = "4294967290"
"""The id of the step in which salloc runs its shell (LaunchParameters=
use_interactive_step): the shell is on one node, but the user has the whole job."""
_STALE = "start a new shell, or `unset ${!SLURM_@}`, if this shell is not inside a job"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNode:
    """A node of the job."""

    name: str
    slots: int | None
    """How many tasks Slurm plans for the node; None: unknown."""
    group: int | None = None
    """Its component of a heterogeneous job; None: the job is not heterogeneous."""
    gpus: int | None = None
    """How many GPUs a step must ask for to get all of the job's GPUs there.

    None: a step gets all of them by itself. Where the job was asked for GPUs per task,
    a step gets only as many as its own tasks would need.
    """


def is_inside(environ: Mapping[str, str]) -> bool:
    """Whether ``environ`` is the environment of a job's script, shell or step."""
    return bool(environ.get("SLURM_JOB_ID")) and any(
        environ.get(name)
        for name in ("SLURM_JOB_NODELIST", "SLURM_JOB_NODELIST_HET_GROUP_0")
    )


def nodes(environ: Mapping[str, str]) -> tuple[SlurmNode, ...]:
    """The job's or step's nodes in the job's order. Raises ConfigError, StartError."""
    groups = _number(environ, "SLURM_HET_SIZE")
    if groups is None:
        listed = _group(environ, None)
    else:
        listed = [node for group in range(groups) for node in _group(environ, group)]
    if not listed:
        raise StartError("not inside a Slurm job: SLURM_JOB_NODELIST is not set")
    return _of_step(environ, _merged(listed))


def require_one_launcher(environ: Mapping[str, str]) -> None:
    """Raise StartError if srun started several launchers: ``srun -n 4 tfcluster``."""
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
    if tasks is not None and tasks > 1 and "SLURM_PROCID" in environ:
        raise StartError(
            f"srun started tfcluster {tasks} times, but it starts the tasks itself",
            hint="omit srun: then the tasks run on all nodes of the job",
        )


def gpus_per_task(environ: Mapping[str, str], suffix: str = "") -> int | None:
    """The number in ``a100:2`` or ``gres:gpu:2``; None: the job has none per task."""
    counted = environ.get(f"SLURM_GPUS_PER_TASK{suffix}", "")
    listed = environ.get(f"SLURM_TRES_PER_TASK{suffix}", "").split(",")
    resources = [word for word in listed if "gpu" in word]
    match = re.search(r"(?:^|[:=])([0-9]{1,4})$", counted or "".join(resources[:1]))
    return int(match[1]) if match else None


def counts(text: str) -> list[int]:
    """``2(x3),1`` as [2, 2, 2, 1]. Raises ValueError."""
    numbers: list[int] = []
    for item in text.split(","):
        match = _COUNTS.fullmatch(item)
        if not match:
            raise ValueError(f"{item!r} is not a count")
        times = int(match[2] or 1)
        if len(numbers) + times > 100_000:
            raise ValueError(f"{text!r} counts too many nodes")
        numbers += [int(match[1])] * times
    return numbers


def _group(environ: Mapping[str, str], group: int | None) -> list[SlurmNode]:
    suffix = "" if group is None else f"_HET_GROUP_{group}"
    key = f"SLURM_JOB_NODELIST{suffix}"
    text = environ.get(key)
    if not text:
        if group is None:
            return []
        raise _broken(environ, "SLURM_HET_SIZE", f"{key} is not set")
    names = _names(environ, key, text)
    counted = f"SLURM_JOB_NUM_NODES{suffix}"
    if _number(environ, counted) not in (None, len(names)):
        raise _broken(environ, counted, f"{key} names {len(names)} ({text})")
    per_task = gpus_per_task(environ, suffix)
    slots = _slots(environ, f"SLURM_TASKS_PER_NODE{suffix}", names)
    return [
        SlurmNode(
            name=name,
            slots=tasks,
            group=group,
            gpus=tasks and per_task and tasks * per_task,
        )
        for name, tasks in zip(names, slots, strict=True)
    ]


def _of_step(
    environ: Mapping[str, str], nodes: tuple[SlurmNode, ...]
) -> tuple[SlurmNode, ...]:
    key = "SLURM_STEP_NODELIST"
    if not environ.get(key) or environ.get("SLURM_STEP_ID") == _INTERACTIVE:
        return nodes
    names = _names(environ, key, environ[key])
    job = [node.name for node in nodes]
    if strange := sorted({*names} - {*job}):
        problem = f"{strange[0]} is not a node of the job ({fold(job)})"
        raise _broken(environ, key, problem)
    return tuple(node for node in nodes if node.name in names)


def _slots(
    environ: Mapping[str, str], key: str, names: list[str]
) -> list[int] | list[None]:
    text = environ.get(key)
    # Inside a step, the counts are those of the step, not of the job.
    if not text or environ.get("SLURM_STEP_NODELIST"):
        return [None] * len(names)
    try:
        slots = counts(text)
    except ValueError as error:
        raise _broken(environ, key, str(error)) from error
    if len(slots) != len(names):
        job = f"the job has {len(names)} ({fold(names)})"
        raise _broken(environ, key, f"counts {len(slots)} nodes, but {job}")
    return slots


def _names(environ: Mapping[str, str], key: str, text: str) -> list[str]:
    try:
        names = expand(text)
    except HostlistError as error:
        raise _broken(environ, key, error.message) from error
    for name in names:
        if problem := host_name_problem(name):
            raise _broken(environ, key, f"{name!r} {problem}")
    return names


def _broken(environ: Mapping[str, str], key: str, problem: str) -> ConfigError:
    return ConfigError([Problem(f"{key}={environ[key]!r}", problem, _STALE)])


def _merged(nodes: list[SlurmNode]) -> tuple[SlurmNode, ...]:
    """One SlurmNode per name: two components of a job can share a node."""
    by_name: dict[str, SlurmNode] = {}
    for node in nodes:
        first = by_name.setdefault(node.name, node)
        if first is not node and first.slots is not None and node.slots is not None:
            slots = first.slots + node.slots
            by_name[node.name] = SlurmNode(
                name=node.name, slots=slots, group=first.group
            )
    return tuple(by_name.values())


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """The number in a variable; None if unset. Raises ConfigError if it is invalid."""
    text = environ.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise _broken(environ, name, "is not a number")
    return int(text)
