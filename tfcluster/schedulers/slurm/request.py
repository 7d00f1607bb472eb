"""The section ``slurm:``, and what is asked of Slurm for it and the tasks. Pure.

The tasks are the source of truth. The section may say how they are spread over nodes,
and more; where it contradicts the tasks, ``contradictions`` says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tfcluster.base.light_dataclasses import replace
from tfcluster.plan.model import Allocation, Description, Host
from tfcluster.plan.placement import place
from tfcluster.schedulers.base import setting
from tfcluster.schedulers.options import Mistake, set_twice


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSettings:
    """What is requested from Slurm. The number of tasks follows from `tasks`."""

    nodes: int | None = setting("count", "sbatch --nodes.")
    tasks_per_node: int | None = setting(
        "count", "At most this many tasks on each node."
    )
    cpus_per_task: int | None = setting("count", "sbatch --cpus-per-task.")
    mem: str | None = setting("memory", "sbatch --mem: memory of each node, as 16G.")
    gpus_per_node: int | None = setting(
        "gpus", "sbatch --gpus-per-node. Default: what `gpus` of the tasks needs."
    )
    partition: str | None = setting("words", "sbatch --partition.")
    account: str | None = setting("word", "sbatch --account.")
    qos: str | None = setting("word", "sbatch --qos.")
    constraint: str | None = setting("line", "sbatch --constraint: features of nodes.")
    time: str | None = setting("time", "sbatch --time: as 4h, or in Slurm's format.")
    options: tuple[str, ...] = setting(
        "options", "More options of sbatch, one per item.", ()
    )


SYNONYMS = {
    "queue": "partition",
    **dict.fromkeys(
        ("walltime", "time_limit", "timelimit", "timeout", "timeout_min"), "time"
    ),
    **dict.fromkeys(("memory", "mem_gb", "job_mem", "mem_per_node"), "mem"),
    **dict.fromkeys(("cores", "cpus", "cpu", "ncpus", "job_cpu"), "cpus_per_task"),
    "ntasks_per_node": "tasks_per_node",
    "processes_per_node": "tasks_per_node",
    "project": "account",
    "feature": "constraint",
    "features": "constraint",
    "additional_parameters": "options",
}
ADVICE = {
    "setup": "setup: [module load cuda], at the top level",
    "job_script_prologue": "setup: [module load cuda], at the top level",
}
EXAMPLE = """\
backend: slurm                   # `tfcluster launch` submits a job, or uses its own
slurm:
  nodes: 2                       # the tasks below are divided among them
  time: 1h
  # mem: 16G                     # of each node
  # cpus_per_task: 8
  # partition: gpu
  # account: x
  # options: ["--exclusive"]     # any other options of sbatch

tasks:
  worker: 2                      # rank 0 is worker 0, or a chief
  # worker: {count: 8, gpus: 1}  # the job asks for these GPUs
  # ps: 1                        # parameter servers, built in
"""


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
QUOTABLE = re.compile(r'[^"\\\x00-\x1f\x7f-\x9f\u2028\u2029]*')
"""What can stand in double quotes in a directive."""
_GPUS = re.compile(r"--gpus.*|--gres.*|--tres.*")


@dataclass(frozen=True, slots=True)
class SlurmRequest:
    """The size of a job; None: Slurm decides, or it is not asked for."""

    tasks: int | None
    """None: an option of the user has the number."""
    nodes: int | None
    tasks_per_node: int | None
    gpus_per_node: int | None
    gpus_per_task: int | None


def slurm_options(slurm: SlurmSettings) -> dict[str, tuple[int, str]]:
    """Long name of each of the user's options -> its index and value; the last wins."""
    found: dict[str, tuple[int, str]] = {}
    for index, option in enumerate(slurm.options):
        name, _, value = option.partition("=")
        if not option.startswith("--") and option[1:2] in _LETTERS:
            name, value = _LETTERS[option[1]], option[2:].strip()
        found[name] = (index, value)
    return found


def slurm_request(description: Description, slurm: SlurmSettings) -> SlurmRequest:
    """The size of the job for these tasks."""
    options = slurm_options(slurm)
    tasks = len(description.task_ids())
    asked = _number(options, "--ntasks")
    nodes = slurm.nodes or _number(options, "--nodes")
    each = slurm.tasks_per_node or _number(options, "--ntasks-per-node")
    gpus = _gpus_on_node(slurm)
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


def contradictions(description: Description, slurm: SlurmSettings) -> Iterator[Mistake]:
    """What the section says against the tasks, or twice, or cannot say."""
    options = slurm_options(slurm)
    if slurm.constraint is not None and not QUOTABLE.fullmatch(slurm.constraint):
        message = f"{slurm.constraint!r} cannot be used in a directive of sbatch"
        yield Mistake("slurm.constraint", message)
    for option, key in SLURM_KEYS.items():
        if option in options and getattr(slurm, key) is not None:
            index, _ = options[option]
            yield set_twice("slurm", index, option, key)
    tasks, where = len(description.task_ids()), _where(options)
    nodes = slurm.nodes or _number(options, "--nodes")
    each = slurm.tasks_per_node or _number(options, "--ntasks-per-node")
    asked = _number(options, "--ntasks")
    if asked is not None and asked < tasks:
        message = f"--ntasks={asked} is too few for {tasks} tasks"
        hint = "remove it: the number follows from 'tasks'"
        yield Mistake(where["--ntasks"], message, hint, "tasks")
    if nodes is not None and nodes > tasks:
        message = f"{nodes} nodes are too many for {_tasks(tasks)}"
        hint = f"nodes: {tasks}, or more tasks"
        yield Mistake(where["--nodes"], message, hint, "tasks")
    elif nodes is not None and each is not None and nodes * each < tasks:
        message = (
            f"{_nodes(nodes)} with {_tasks(each)} each: {nodes * each}, too few for "
            f"{tasks} tasks"
        )
        hint = f"omit it, or tasks_per_node: {-(-tasks // nodes)}"
        yield Mistake(where["--ntasks-per-node"], message, hint, "tasks")
    yield from _gpu_contradictions(description, slurm, options, where)
    if description.restart.requeues and "--no-requeue" in options:
        message = "'--no-requeue' forbids what 'restart.on_time_limit' asks for"
        index, _ = options["--no-requeue"]
        yield Mistake(f"slurm.options.{index}", message, "remove one of them")


def _gpu_contradictions(
    description: Description,
    slurm: SlurmSettings,
    options: Mapping[str, tuple[int, str]],
    where: Mapping[str, str],
) -> Iterator[Mistake]:
    wanting = [kind for kind, group in description.tasks.items() if group.gpus]
    if not wanting:
        return
    key, request = f"tasks.{wanting[0]}.gpus", slurm_request(description, slurm)
    given = _gpus_on_node(slurm)
    if request.nodes is None or request.tasks_per_node is None:
        if request.gpus_per_task or any(map(_GPUS.fullmatch, options)):
            return
        message = "the GPUs of a node are unknown: not all tasks need the same number"
        hint = "slurm: {nodes: N}, or tasks_per_node"
        yield Mistake("slurm", message, hint, key)
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
        yield Mistake(where["--gpus-per-node"], message, hint, key)


def _gpus_on_node(slurm: SlurmSettings) -> int | None:
    """How many GPUs of a node the user asks for."""
    if slurm.gpus_per_node is not None:
        return slurm.gpus_per_node
    return _number(slurm_options(slurm), "--gpus-per-node")


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
