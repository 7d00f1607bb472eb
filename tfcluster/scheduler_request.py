"""What is asked of a scheduler, derived from the tasks and its section. Pure.

The tasks are the source of truth. The section may say how they are spread over nodes,
and more; where it contradicts the tasks, ``contradictions`` says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tfcluster.model import Allocation, Description, Host, Slurm
from tfcluster.placement import place

SLURM_KEYS = {
    "--nodes": "nodes",
    "--ntasks-per-node": "tasks_per_node",
    "--cpus-per-task": "cpus_per_task",
    "--mem": "mem",
    "--gpus-per-node": "gpus_per_node",
    "--partition": "partition",
    "--account": "account",
    "--qos": "qos",
    "--constraint": "constraint",
    "--time": "time",
}
"""Option of sbatch -> key of ``slurm``, in the order of a job script."""
_LETTERS = {
    "N": "--nodes",
    "n": "--ntasks",
    "c": "--cpus-per-task",
    "G": "--gpus",
    "p": "--partition",
    "A": "--account",
    "q": "--qos",
    "C": "--constraint",
    "t": "--time",
}
_SGE_KEYS = {"-pe": "parallel_environment", "-q": "queue"}
_GPUS = re.compile(r"--gpus.*|--gres.*|--tres.*")
_GPU_RESOURCE = re.compile(r".*(?:gpu|cuda).*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A value that cannot be true together with another one."""

    key: str
    """The dotted key of the value; for an option ``slurm.options.INDEX``."""
    message: str
    other: str
    """The dotted key of the other value."""
    hint: str | None = None
    fatal: bool = True
    """Whether it is an error, or only a warning."""


@dataclass(frozen=True, slots=True)
class SlurmRequest:
    """The size of a job; None: Slurm decides, or it is not asked for."""

    tasks: int | None
    """None: an option of the user has the number."""
    nodes: int | None
    tasks_per_node: int | None
    gpus_per_node: int | None
    gpus_per_task: int | None


def slurm_options(slurm: Slurm) -> dict[str, tuple[int, str]]:
    """Long name of each of the user's options -> its index and value; the last wins."""
    found: dict[str, tuple[int, str]] = {}
    for index, option in enumerate(slurm.options):
        name, _, value = option.partition("=")
        if not option.startswith("--") and option[1:2] in _LETTERS:
            name, value = _LETTERS[option[1]], option[2:].strip()
        found[name] = (index, value)
    return found


def slurm_request(description: Description) -> SlurmRequest:
    """The size of the job for these tasks."""
    slurm, options = description.slurm, slurm_options(description.slurm)
    tasks = len(description.task_ids())
    asked = _number(options, "--ntasks")
    nodes = slurm.nodes or _number(options, "--nodes")
    each = slurm.tasks_per_node or _number(options, "--ntasks-per-node")
    gpus = _gpus_on_node(description)
    one = _gpus_of_task(description)
    if nodes is None and each is None and "--nodes" not in options and one and gpus:
        each = max(1, gpus // one)
    if nodes is None and each is not None and "--nodes" not in options:
        nodes = -(-tasks // each)
    elif each is None and nodes is not None:
        each = -(-max(tasks, asked or 0) // nodes)
    per_task = None
    if slurm.gpus_per_node is None and not any(map(_GPUS.fullmatch, options)):
        if nodes is None or each is None:
            per_task = one or None
        else:
            gpus = max(gpus_needed(description, nodes, each), default=0) or None
    given = slurm.tasks_per_node or _number(options, "--ntasks-per-node")
    uneven = nodes is not None and bool(max(tasks, asked or 0) % nodes)
    return SlurmRequest(
        tasks=None if "--ntasks" in options else tasks,
        nodes=nodes,
        # Slurm would fill the first nodes with this number, and leave the last idle.
        tasks_per_node=None if uneven and not (given or gpus) else each,
        gpus_per_node=gpus,
        gpus_per_task=per_task,
    )


def sge_slots(description: Description) -> int:
    return description.sge.slots or len(description.task_ids())


def gpus_needed(description: Description, nodes: int, each: int) -> list[int]:
    """How many GPUs the tasks of each of ``nodes`` nodes with ``each`` slots need.

    Empty if the tasks do not fit.
    """
    if nodes * each < len(description.task_ids()):
        return []
    plain = {
        kind: replace(group, gpus=None) for kind, group in description.tasks.items()
    }
    hosts = tuple(Host(name=str(n), slots=each) for n in range(nodes))
    needed = dict.fromkeys(range(nodes), 0)
    for found in place(replace(description, tasks=plain), Allocation(hosts=hosts)):
        wanted = description.tasks[found.task.type].gpus
        needed[int(found.host.name)] += wanted or 0
    return list(needed.values())


def contradictions(description: Description) -> Iterator[Contradiction]:
    """What the section of the backend says against the tasks, or twice."""
    if description.backend == "slurm":
        yield from _slurm_contradictions(description)
    elif description.backend == "sge":
        yield from _sge_contradictions(description)


def _slurm_contradictions(description: Description) -> Iterator[Contradiction]:
    slurm, options = description.slurm, slurm_options(description.slurm)
    for option, key in SLURM_KEYS.items():
        if option in options and getattr(slurm, key) is not None:
            index, _ = options[option]
            message = f"option {option} is also set by 'slurm.{key}'"
            yield Contradiction(
                f"slurm.options.{index}", message, f"slurm.{key}", "keep one of them"
            )
    tasks, where = len(description.task_ids()), _where(options)
    nodes = slurm.nodes or _number(options, "--nodes")
    each = slurm.tasks_per_node or _number(options, "--ntasks-per-node")
    asked = _number(options, "--ntasks")
    if asked is not None and asked < tasks:
        message = f"--ntasks={asked} is too few for {tasks} tasks"
        hint = "remove it: the number follows from 'tasks'"
        yield Contradiction(where["--ntasks"], message, "tasks", hint)
    if nodes is not None and nodes > tasks:
        message = f"{nodes} nodes are too many for {_tasks(tasks)}"
        hint = f"nodes: {tasks}, or more tasks"
        yield Contradiction(where["--nodes"], message, "tasks", hint)
    elif nodes is not None and each is not None and nodes * each < tasks:
        message = (
            f"{_nodes(nodes)} with {_tasks(each)} each: {nodes * each}, too few for "
            f"{tasks} tasks"
        )
        hint = f"omit it, or tasks_per_node: {-(-tasks // nodes)}"
        yield Contradiction(where["--ntasks-per-node"], message, "tasks", hint)
    yield from _gpu_contradictions(description, options, where)


def _gpu_contradictions(
    description: Description,
    options: Mapping[str, tuple[int, str]],
    where: Mapping[str, str],
) -> Iterator[Contradiction]:
    wanting = [kind for kind, group in description.tasks.items() if group.gpus]
    if not wanting:
        return
    key, request = f"tasks.{wanting[0]}.gpus", slurm_request(description)
    given = _gpus_on_node(description)
    if request.nodes is None or request.tasks_per_node is None:
        if request.gpus_per_task or any(map(_GPUS.fullmatch, options)):
            return
        message = "the GPUs of a node are unknown: not all tasks need the same number"
        hint = "slurm: {nodes: N}, or tasks_per_node"
        yield Contradiction("slurm", message, key, hint)
        return
    needed = gpus_needed(description, request.nodes, request.tasks_per_node)
    most = max(needed, default=0)
    if given is not None and most > given:
        message = f"{given} GPUs per node are too few: the tasks of a node need {most}"
        even = replace(description, spread=True)
        spread = max(gpus_needed(even, request.nodes, request.tasks_per_node))
        hint = f"omit it, or gpus_per_node: {most}, or more nodes"
        if spread <= given:
            hint = "spread: true"
        yield Contradiction(where["--gpus-per-node"], message, key, hint)


def _sge_contradictions(description: Description) -> Iterator[Contradiction]:
    sge, tasks = description.sge, len(description.task_ids())
    for index, word in enumerate(sge.options):
        key = _SGE_KEYS.get(word)
        if key is not None and getattr(sge, key) is not None:
            message = f"option {word} is also set by 'sge.{key}'"
            yield Contradiction(
                f"sge.options.{index}", message, f"sge.{key}", "keep one of them"
            )
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
        yield Contradiction("sge", message, f"tasks.{wanting[0]}.gpus", hint, False)


def _too_few_slots(slots: int, tasks: int, key: str) -> Iterator[Contradiction]:
    if slots < tasks:
        message = f"{slots} slots are too few for {tasks} tasks"
        hint = "remove it: the number follows from 'tasks'"
        yield Contradiction(key, message, "tasks", hint)


def _gpus_on_node(description: Description) -> int | None:
    """How many GPUs of a node the user asks for."""
    given = description.slurm.gpus_per_node
    if given is not None:
        return given
    return _number(slurm_options(description.slurm), "--gpus-per-node")


def _gpus_of_task(description: Description) -> int | None:
    """How many GPUs every task needs; None: different numbers, or unknown."""
    (first, *others) = {group.gpus for group in description.tasks.values()}
    return None if others else first


def _where(options: Mapping[str, tuple[int, str]]) -> dict[str, str]:
    """Option of sbatch -> the dotted key that sets it."""
    keys = {option: f"slurm.{key}" for option, key in SLURM_KEYS.items()}
    return keys | {
        name: f"slurm.options.{index}" for name, (index, _) in options.items()
    }


def _number(options: Mapping[str, tuple[int, str]], name: str) -> int | None:
    _, value = options.get(name, (0, ""))
    plain = value.isascii() and value.isdecimal() and len(value) < 10
    return int(value) or None if plain else None


def _tasks(count: int) -> str:
    return "1 task" if count == 1 else f"{count} tasks"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
