"""The section ``slurm:``, and the directives that ask Slurm for it and the tasks. Pure.

The tasks are the source of truth. The section may say how they are spread over nodes,
and more; where it contradicts the tasks, ``contradictions`` says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import ceil

from tfcluster.base.durations import time_limit_s
from tfcluster.base.errors import ConfigError, Problem
from tfcluster.base.light_dataclasses import replace
from tfcluster.plan.model import Allocation, Description, Host
from tfcluster.plan.placement import place
from tfcluster.schedulers.base import LauncherCommand, setting
from tfcluster.schedulers.options import (
    ARRAY,
    FOLLOWS,
    NOTHING,
    OTHER_USER,
    SIZE,
    WORKDIR,
    Mistake,
    OptionTable,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSettings:
    """What is requested from Slurm. The number of tasks follows from `tasks`."""

    nodes: int | None = setting("count", "sbatch --nodes.", option="--nodes")
    tasks_per_node: int | None = setting(
        "count", "At most this many tasks on each node.", option="--ntasks-per-node"
    )
    cpus_per_task: int | None = setting(
        "count", "sbatch --cpus-per-task.", option="--cpus-per-task"
    )
    mem: str | None = setting(
        "memory", "sbatch --mem: memory of each node, as 16G.", option="--mem"
    )
    gpus_per_node: int | None = setting(
        "gpus",
        "sbatch --gpus-per-node. Default: what `gpus` of the tasks needs.",
        option="--gpus-per-node",
    )
    partition: str | None = setting(
        "words", "sbatch --partition.", option="--partition"
    )
    account: str | None = setting("word", "sbatch --account.", option="--account")
    qos: str | None = setting("word", "sbatch --qos.", option="--qos")
    constraint: str | None = setting(
        "line", "sbatch --constraint: features of nodes.", option="--constraint"
    )
    time: str | None = setting(
        "time", "sbatch --time: as 4h, or in Slurm's format.", option="--time"
    )
    options: tuple[str, ...] = setting(
        "options", "More options of sbatch, one per item.", ()
    )


SYNONYMS = {
    "project": "account",
    **dict.fromkeys(("feature", "features"), "constraint"),
    "additional_parameters": "options",
}
ADVICE = dict.fromkeys(
    ("setup", "job_script_prologue"), "setup: [module load cuda], at the top level"
)
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
"""


SLURM_KEYS = {
    key.metadata["option"]: key.name
    for key in fields(SlurmSettings)
    if key.metadata["option"]
}
"""Option of sbatch -> key of ``slurm``, in the order of a job script."""
QUOTABLE = re.compile(r'[^"\\\x00-\x1f\x7f-\x9f\u2028\u2029]*')
"""What can stand in double quotes in a directive."""
OPTIONS = OptionTable(
    command="sbatch",
    joined=True,
    plain=QUOTABLE,
    denied={
        "--ntasks": SIZE,
        "--wrap": "the script defines what runs",
        **dict.fromkeys(("--uid", "--gid"), OTHER_USER),
        "--parsable": "tfcluster reads sbatch's answer",
        "--wait": FOLLOWS,
        "--chdir": WORKDIR,
        **dict.fromkeys(("--test-only", "--help", "--usage", "--version"), NOTHING),
        "--array": ARRAY,
        "--clusters": "the run's record could not be found there",
    },
    letters={
        "A": "--account",
        "C": "--constraint",
        "D": "--chdir",
        "G": "--gpus",
        "M": "--clusters",
        "N": "--nodes",
        "V": "--version",
        "W": "--wait",
        "a": "--array",
        "c": "--cpus-per-task",
        "h": "--help",
        "n": "--ntasks",
        "o": "--output",
        "p": "--partition",
        "q": "--qos",
        "t": "--time",
    },
)
_GPUS = re.compile(r"--gpus.*|--gres.*|--tres.*")


WARNING_S = 60
"""The launcher is warned at least this long before the time limit."""
_SWEEP_S = 20
"""How long the end of a run may take beyond the grace period of its tasks."""
_RESULTS_S = 60
"""How long results may take to come back before the job is requeued."""

_PLAIN = re.compile(r"[A-Za-z0-9_./+@=,:%*-]+")


def slurm_options(slurm: SlurmSettings) -> dict[str, tuple[int, str]]:
    """Long name of each of the user's options -> its index and value; the last wins."""
    options: dict[str, tuple[int, str]] = {}
    for index, option in enumerate(slurm.options):
        _, _, value = option.partition("=")
        if not option.startswith("--"):
            value = option[2:].strip()
        options[OPTIONS.name_of(option)] = (index, value)
    return options


def job_size(description: Description, slurm: SlurmSettings) -> dict[str, int | None]:
    """Option of sbatch -> its value for these tasks; None: Slurm decides."""
    tasks, options = len(description.task_ids()), slurm_options(slurm)
    nodes = _number(slurm, options, "--nodes")
    slots = wanted_slots = _number(slurm, options, "--ntasks-per-node")
    gpus = _number(slurm, options, "--gpus-per-node")
    (first, *others) = {group.gpus for group in description.tasks.values()}
    gpus_of_task = None if others else first  # None: different numbers, or unknown
    if nodes is None and "--nodes" not in options:
        if slots is None and gpus_of_task and gpus:
            slots = max(1, gpus // gpus_of_task)
        nodes = ceil(tasks / slots) if slots else None
    elif nodes is not None and slots is None:
        slots = ceil(tasks / nodes)
    per_task = None
    if slurm.gpus_per_node is None and not any(map(_GPUS.fullmatch, options)):
        if nodes is None or slots is None:
            per_task = gpus_of_task or None
        else:
            gpus = max(gpus_needed(description, nodes, slots), default=0) or None
    # Slurm would fill the first nodes with an even share, and leave the last idle.
    uneven = nodes is not None and tasks % nodes and not (wanted_slots or gpus)
    return {
        "--nodes": nodes,
        "--ntasks": tasks,
        "--ntasks-per-node": None if uneven else slots,
        "--gpus-per-node": gpus,
        "--gpus-per-task": per_task,
    }


def gpus_needed(description: Description, nodes: int, slots: int) -> list[int]:
    """How many GPUs each node's tasks need; empty if the tasks do not fit."""
    if nodes * slots < len(description.task_ids()):
        return []
    plain = {
        kind: replace(group, gpus=None) for kind, group in description.tasks.items()
    }
    hosts = tuple(Host(name=str(n), slots=slots) for n in range(nodes))
    needed = dict.fromkeys(range(nodes), 0)
    for placed in place(replace(description, tasks=plain), Allocation(hosts=hosts)):
        needed[int(placed.host.name)] += description.tasks[placed.task.type].gpus or 0
    return list(needed.values())


def contradictions(description: Description, slurm: SlurmSettings) -> Iterator[Mistake]:
    """What the section says against the tasks, or cannot say."""
    options = slurm_options(slurm)
    if slurm.constraint is not None and not QUOTABLE.fullmatch(slurm.constraint):
        message = f"{slurm.constraint!r} cannot be used in a directive of sbatch"
        yield Mistake("slurm.constraint", message)
    tasks = len(description.task_ids())
    nodes = _number(slurm, options, "--nodes")
    slots = _number(slurm, options, "--ntasks-per-node")
    if nodes is not None and nodes > tasks:
        message = f"{nodes} nodes are too many for {_counted(tasks, 'task')}"
        hint = f"nodes: {tasks}, or more tasks"
        yield Mistake(_place(options, "--nodes"), message, hint, "tasks")
    elif nodes is not None and slots is not None and nodes * slots < tasks:
        size = f"{_counted(nodes, 'node')} with {_counted(slots, 'task')} each"
        message = f"{size}: {nodes * slots}, too few for {tasks} tasks"
        hint = f"omit it, or tasks_per_node: {ceil(tasks / nodes)}"
        yield Mistake(_place(options, "--ntasks-per-node"), message, hint, "tasks")
    yield from _gpu_contradictions(description, slurm, options)
    if description.restart.requeues and "--no-requeue" in options:
        message = "'--no-requeue' forbids what 'restart.on_time_limit' asks for"
        yield Mistake(_place(options, "--no-requeue"), message, "remove one of them")


def _gpu_contradictions(
    description: Description,
    slurm: SlurmSettings,
    options: Mapping[str, tuple[int, str]],
) -> Iterator[Mistake]:
    needing = [kind for kind, group in description.tasks.items() if group.gpus]
    if not needing:
        return
    key, size = f"tasks.{needing[0]}.gpus", job_size(description, slurm)
    gpus = _number(slurm, options, "--gpus-per-node")
    nodes, slots = size["--nodes"], size["--ntasks-per-node"]
    if nodes is None or slots is None:
        if size["--gpus-per-task"] or any(map(_GPUS.fullmatch, options)):
            return
        message = "the GPUs of a node are unknown: not all tasks need the same number"
        hint = "slurm: {nodes: N}, or tasks_per_node"
        yield Mistake("slurm", message, hint, key)
        return
    most = max(gpus_needed(description, nodes, slots), default=0)
    if gpus is not None and most > gpus:
        message = f"{gpus} GPUs per node are too few: the tasks of a node need {most}"
        hint = f"omit it, or gpus_per_node: {most}, or more nodes"
        even = replace(description, spread=True)
        if max(gpus_needed(even, nodes, slots)) <= gpus:
            hint = "spread: true"
        yield Mistake(_place(options, "--gpus-per-node"), message, hint, key)


def _place(options: Mapping[str, tuple[int, str]], name: str) -> str:
    """The dotted key that sets what this option of sbatch means."""
    if name in options:
        return f"slurm.options.{options[name][0]}"
    return f"slurm.{SLURM_KEYS[name]}"


def _number(
    slurm: SlurmSettings, options: Mapping[str, tuple[int, str]], name: str
) -> int | None:
    """The number that the key for this option sets, or the option itself."""
    number: int | None = getattr(slurm, SLURM_KEYS[name])
    _, value = options.get(name, (0, ""))
    if number is None and re.fullmatch("[1-9][0-9]{0,8}", value):
        return int(value)
    return number


def _counted(count: int, noun: str) -> str:
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"


def directives(
    description: Description, slurm: SlurmSettings, launcher: LauncherCommand
) -> Iterator[str]:
    """The lines of the script between its heading and its commands."""
    yield from (f"#SBATCH {line}" for line in _requests(description, slurm))
    yield ""
    yield from _fixed(description, slurm, launcher)


def _requests(description: Description, slurm: SlurmSettings) -> Iterator[str]:
    size, options = job_size(description, slurm), slurm_options(slurm)
    yield f"--job-name={_value('name', description.name)}"
    for option in dict.fromkeys((*size, *SLURM_KEYS)):
        key = SLURM_KEYS.get(option, "")
        value = size[option] if option in size else getattr(slurm, key)
        if value is not None and option not in options:
            yield f"{option}={_value(f'slurm.{key}', str(value))}"
    for option in slurm.options:
        name, equals, value = option.partition("=")
        yield f"{name}={_value(name, value)}" if equals else _value(name, option)


def _fixed(
    description: Description, slurm: SlurmSettings, launcher: LauncherCommand
) -> Iterator[str]:
    """The directives that every job has, unless its options set them."""
    options = slurm_options(slurm)
    if "--export" not in options:
        yield "# Pass nothing from the submitting shell; use 'env:' and 'secrets:'."
        yield "#SBATCH --export=NONE"
    if "--signal" not in options:
        yield "# A warning signal to the launcher, which ends the run with code 124."
        yield f"#SBATCH --signal=B:USR1@{_warning_s(description, slurm)}"
    if "--output" not in options:
        yield "# The launcher's output; task output is in the folder logs."
        log = str(launcher.log).replace("%", "%%")
        yield f"#SBATCH --output={_value('state folder', log)}"
    yield "#SBATCH --open-mode=append"
    if description.restart.requeues:
        yield "# After the time limit the launcher asks Slurm to start the job again."
        yield "#SBATCH --requeue"


def _warning_s(description: Description, slurm: SlurmSettings) -> int:
    """The seconds that an orderly end needs, but at most a quarter of a short limit."""
    needed_s = max(WARNING_S, ceil(description.grace_s) + _SWEEP_S)
    if description.restart.requeues and description.results is not None:
        needed_s += _RESULTS_S
    limit_s = None if slurm.time is None else time_limit_s(slurm.time)
    return needed_s if limit_s is None else min(needed_s, max(10, limit_s // 4))


def _value(where: str, text: str) -> str:
    """``text``, quoted for an sbatch directive if needed. Raises ConfigError."""
    if _PLAIN.fullmatch(text):
        return text
    if not QUOTABLE.fullmatch(text):
        problem = f"{text!r} cannot be used in a directive of sbatch"
        raise ConfigError([Problem(where, problem)])
    return f'"{text}"'
