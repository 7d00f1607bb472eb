"""From a placement to each task's argv, environment and TF_CONFIG.

Pure: ports, secrets and the run's identity are arguments. Whatever the tasks of a group
share is computed once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from tfcluster.base.isolated_import import PACKAGE_ROOT, module_argv
from tfcluster.base.light_dataclasses import as_dict, dataclass, replace
from tfcluster.base.task_id import TaskId
from tfcluster.base.vocabulary import BUILT_IN_SERVERS, RANKED_TYPES
from tfcluster.plan import program
from tfcluster.plan.model import Description, Interpreter, Runtime, Strategy
from tfcluster.plan.placement import Place
from tfcluster.plan.program import Program
from tfcluster.plan.transport_choice import AUTO, TENSORFLOW, chosen_transport

if TYPE_CHECKING:
    from tfcluster.documents.plan import TaskEntry


from tfcluster.base.errors import StartError

BOOTSTRAP = "tfcluster.runtime.task.bootstrap"
WARM = "tfcluster.runtime.warm.preloader"
BELOW = "below-wrapper"
"""Tells the bootstrap that a wrapper may have changed the environment."""

UNKNOWN_PORT = "auto"
"""Stands for the port in a plan's addresses: agents choose ports when they start."""

_OWN_GPUS = "TFCLUSTER_OWN_GPUS"
"""Set for all ranks if ``transport: auto`` may be ``tensorflow``."""

ALLOW_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
"""Makes TensorFlow take a GPU's memory in parts, instead of all when it starts."""

NO_PORT = ("evaluator",)
"""Task types that nobody connects to."""

PARAMETER_SERVICE = (Strategy.PARAMETER_SERVER, Strategy.REPLICATED)
"""Strategies under which ps tasks keep the variables for training tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """One task, as far as we know it before any host is contacted."""

    place: Place
    argv: tuple[str, ...]
    """The command as a person would run it by hand."""
    arguments: tuple[str, ...]
    """The bootstrap's arguments; if empty, ``argv`` is executed as it is."""
    warm: str | None
    """The key of the warm interpreter that forks the task; None: it is executed."""
    python: Interpreter
    """The interpreter; empty if the command is not known to be Python."""
    options: tuple[str, ...]
    cwd: str
    server: bool
    """Whether the task is a built-in server, which runs until it is stopped."""
    strategy: Strategy
    shared_env: Mapping[str, str]
    """Variables that all tasks of the group have in common; one object for all."""
    own_env: Mapping[str, str]
    device_filters: tuple[str, ...]

    @property
    def task(self) -> TaskId:
        return self.place.task

    @property
    def needs_port(self) -> bool:
        return self.task.type not in NO_PORT

    @property
    def serves_parameters(self) -> bool:
        """Whether the task is a ps with our parameter service besides TensorFlow's."""
        return self.task.type == "ps" and self.strategy in PARAMETER_SERVICE

    @property
    def ports(self) -> int:
        """The number of ports held for the task; the first one is in TF_CONFIG."""
        return int(self.needs_port) + int(self.serves_parameters)

    @property
    def trains(self) -> bool:
        """Whether the training runtime wraps the task's command, whatever it is."""
        ranked = self.place.rank is not None and not self.server
        return ranked and self.strategy is not Strategy.NONE

    @property
    def has_own_gpu(self) -> bool:
        """Whether each rank has a GPU to itself, and may reduce gradients there."""
        return _OWN_GPUS in self.own_env

    @property
    def wrapped(self) -> bool:
        """Whether the task trains below a command that is not a Python program."""
        return self.trains and not self.arguments

    def at(self, place: Place) -> TaskSpec:
        """The same task in another place, with that place's GPUs and local ranks."""
        found = {**_local_ranks_env(place), **_gpus_env(place)}
        return replace(self, place=place, own_env={**self.own_env, **found})

    def with_gpus(self, *, own: bool, shared: bool) -> TaskSpec:
        """The same task, with the variables that depend on the GPUs of all tasks.

        ``own``: each rank has a GPU to itself. ``shared``: another task uses a GPU of
        this task, too. Without the variable for that, the first of these tasks would
        take all of the GPU's memory.
        """
        told = {_OWN_GPUS, ALLOW_GROWTH}
        env = {k: v for k, v in self.own_env.items() if k not in told}
        if own and self.place.rank is not None:
            env[_OWN_GPUS] = "1"
        if shared and ALLOW_GROWTH not in self.shared_env:
            env[ALLOW_GROWTH] = "true"
        return replace(self, own_env=env)

    def under(self, python: Interpreter) -> TaskSpec:
        """The same task under another interpreter."""
        rest = self.argv[len(self.python) :]
        return replace(self, argv=(*python, *rest), python=python)

    def cold_argv(self, root: str = PACKAGE_ROOT) -> tuple[str, ...]:
        """The argv that starts the task without a warm interpreter."""
        plain = self.strategy is Strategy.NONE and not self.server
        if plain or not self.arguments or not self.python:
            return self.argv
        words = self.arguments if len(self.python) == 1 else (BELOW, *self.arguments)
        return module_argv(
            self.python, BOOTSTRAP, *words, options=self.options, root=root
        )


UsesTensorFlow = Callable[[Program], bool]


def compose(
    description: Description,
    places: Sequence[Place],
    uses_tensorflow: UsesTensorFlow,
) -> tuple[TaskSpec, ...]:
    """The TaskSpec of every task, in listing order.

    ``uses_tensorflow`` returns whether a program is worth a warm interpreter.
    """
    size = sum(place.rank is not None for place in places)
    groups = {
        kind: _Group.of(description, kind, uses_tensorflow)
        for kind in description.tasks
    }
    # With built-in servers as workers, the chief's graph spans all tasks, so it must
    # see all of their devices.
    driven = any(groups[kind].server for kind in RANKED_TYPES if kind in groups)
    filtered = "ps" in description.tasks and not driven
    return tell_gpus(
        description.runtime,
        tuple(
            groups[p.task.type].spec(p, size=size, filtered=filtered) for p in places
        ),
    )


def tell_gpus(
    runtime: Runtime,
    specs: Sequence[TaskSpec],
    machines: Mapping[str, str] | None = None,
) -> tuple[TaskSpec, ...]:
    """The tasks, with the variables that depend on the GPUs of all tasks.

    One variable says whether ``transport: auto`` may be ``tensorflow``; all ranks have
    the same value. Tasks that share a GPU take its memory as they need it. ``machines``
    is as for ``chosen_transport``.
    """
    choice = chosen_transport(runtime, [spec.place for spec in specs], machines)
    own = runtime.transport == AUTO and choice.transport == TENSORFLOW
    names = machines or {}
    users: Counter[tuple[str, str]] = Counter()
    for spec in specs:
        users.update(_gpus_of(spec.place, names))
    return tuple(
        spec.with_gpus(
            own=own,
            shared=any(users[gpu] > 1 for gpu in _gpus_of(spec.place, names)),
        )
        for spec in specs
    )


def _gpus_of(place: Place, machines: Mapping[str, str]) -> list[tuple[str, str]]:
    """The GPUs of a task, as pairs of the machine's name and the GPU's name."""
    machine = machines.get(place.host.name, place.host.name)
    return [(machine, gpu) for gpu in place.gpus or ()]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Everything that the tasks of one type share."""

    program: Program
    python: Interpreter
    """The interpreter that a leading ``python`` of a command stands for."""
    server: bool
    warm: str | None
    strategy: Strategy
    env: Mapping[str, str]
    cwd: str

    @classmethod
    def of(
        cls, description: Description, kind: str, uses_tensorflow: UsesTensorFlow
    ) -> _Group:
        group = description.tasks[kind]
        python = description.python
        server = group.server or kind in BUILT_IN_SERVERS
        if server:
            parsed = Program(
                argv=(*python, "-m", BOOTSTRAP, "server"),
                python=python,
                program=("server",),
            )
        else:
            parsed = program.parse(group.command or description.command, python)
        strategy = (
            Strategy.NONE if kind == "evaluator" else description.runtime.strategy
        )
        env = {
            **description.env,
            **group.env,
            "TFCLUSTER_STRATEGY": str(strategy),
            "TFCLUSTER_RUNTIME": _runtime_json(description.runtime),
            "TF_GRPC_REUSE_PORT": "true",
        }
        env.setdefault("PYTHONUNBUFFERED", "1")
        if strategy is not Strategy.NONE:
            # A set of strings must iterate in the same order on every rank. Otherwise,
            # ranks that number its members silently train on different data.
            env.setdefault("PYTHONHASHSEED", "0")
        warm = None
        if (
            description.runtime.warm_start
            and parsed.forkable
            and (server or uses_tensorflow(parsed))
        ):
            # Modules read the environment at import, and a fork inherits the result:
            # another interpreter or environment needs a separate warm interpreter.
            warm = json.dumps([parsed.python, sorted(group.env.items())])
        return cls(
            program=parsed,
            python=python,
            server=server,
            warm=warm,
            strategy=strategy,
            env=env,
            cwd=str(description.workdir),
        )

    def spec(self, place: Place, *, size: int, filtered: bool) -> TaskSpec:
        if self.program.program and not self.server:
            arguments = ("run", *self.program.program)
        else:
            arguments = self.program.program
        filters = tuple(device_filters(place.task, self.strategy, has_ps=filtered))
        own = _own_env(place, size)
        parsed, warm = self.program, self.warm
        if place.host.python is not None and parsed.python == self.python:
            # Hosts may keep their interpreters in different places.
            parsed = replace(
                parsed,
                argv=(*place.host.python, *parsed.argv[len(parsed.python) :]),
                python=place.host.python,
            )
            warm = None if warm is None else f"{json.dumps(place.host.python)} {warm}"
        if filters:
            own["TFCLUSTER_DEVICE_FILTERS"] = json.dumps(filters)
        return TaskSpec(
            place=place,
            argv=parsed.argv,
            arguments=arguments,
            warm=warm,
            python=parsed.python,
            options=parsed.options,
            cwd=self.cwd,
            server=self.server,
            strategy=self.strategy,
            shared_env=self.env,
            own_env=own,
            device_filters=filters,
        )


def _own_env(place: Place, size: int) -> dict[str, str]:
    env = {"TFCLUSTER_TASK": str(place.task)}
    if place.rank is not None:
        env |= {
            "TFCLUSTER_RANK": str(place.rank),
            "TFCLUSTER_SIZE": str(size),
        }
    return env | _local_ranks_env(place) | _gpus_env(place)


def _local_ranks_env(place: Place) -> dict[str, str]:
    """The task's local and cross ranks and sizes, as Horovod defines them."""
    if place.rank is None:
        return {}
    return {
        "TFCLUSTER_LOCAL_RANK": str(place.local_rank),
        "TFCLUSTER_LOCAL_SIZE": str(place.local_size),
        "TFCLUSTER_CROSS_RANK": str(place.cross_rank),
        "TFCLUSTER_CROSS_SIZE": str(place.cross_size),
    }


def _gpus_env(place: Place) -> dict[str, str]:
    if place.gpus is None:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(place.gpus)}


@lru_cache(maxsize=8)
def _runtime_json(runtime: Runtime) -> str:
    return json.dumps(as_dict(runtime), default=str, separators=(",", ":"))


def warm_specs(specs: Iterable[TaskSpec]) -> dict[str, TaskSpec]:
    """The warm interpreters that fork these tasks, which are the tasks of one host.

    By key, with one task of each.
    """
    first: dict[str, TaskSpec] = {}
    for spec in specs:
        if spec.warm is not None and spec.python:
            first.setdefault(spec.warm, spec)
    return first


def address(place: Place, port: int | None) -> str:
    """``host:port`` for TensorFlow, IPv6 in brackets; a ``port`` of None is unknown."""
    host = place.host.reached_by
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{UNKNOWN_PORT if port is None else port}"


def cluster_of(specs: Sequence[TaskSpec], ports: Mapping[TaskId, int]) -> Cluster:
    """The ClusterSpec of all tasks; a task without an entry in ``ports`` gets none."""
    return cluster(
        [
            (spec.task, address(spec.place, ports.get(spec.task)))
            for spec in specs
            if spec.needs_port
        ]
    )


def provisional_cluster(specs: Sequence[TaskSpec]) -> Cluster:
    """The ClusterSpec for a plan.

    Raises StartError if TF_CONFIG with five-digit ports would be too long.
    """
    widest = cluster_of(specs, {spec.task: 65535 for spec in specs})
    last = {spec.task.type: spec.task for spec in specs}
    widest.require_fit(tuple(last.values()))
    return cluster_of(specs, {})


def task_json(spec: TaskSpec, *, port: int | None, log: str) -> TaskEntry:
    """One entry of ``plan --json``, without the TF_CONFIG that all entries share."""
    place = spec.place
    start = "warm" if spec.warm else "exec"
    if spec.wrapped:
        start = "exec, runtime in every Python below it"
    return {
        "task": str(spec.task),
        "rank": place.rank,
        "host": place.host.name,
        "address": address(place, port) if spec.needs_port else None,
        "argv": list(spec.argv),
        "cwd": spec.cwd,
        "env": {**spec.shared_env, **spec.own_env},
        "device_filters": list(spec.device_filters),
        "log": log,
        "start": f"{start}, built-in server" if spec.server else start,
    }


# execve(2): an environment string, with its final NUL, is limited to 32 pages.
MAX_ENV_STRING_BYTES = 131_072

_IN_CLUSTER = ("chief", "worker", "ps")
"""The task types of TensorFlow's cluster, to which evaluator and data do not belong."""

_BETWEEN_GRAPHS = (Strategy.PARAMETER_SERVER, Strategy.REPLICATED, Strategy.NONE)
"""Strategies under which each worker has its own graph. With ``none``, the script
decides, and TensorFlow's own strategies set their own filters."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The ``cluster`` part of TF_CONFIG: addresses by job, as data and as JSON."""

    jobs: Mapping[str, tuple[str, ...]]
    text: str

    def tf_config(self, task: TaskId) -> str:
        """The TF_CONFIG of one task, as JSON."""
        return (
            f'{{"cluster":{self.text},'
            f'"task":{{"type":"{task.type}","index":{task.index}}}}}'
        )

    def require_fit(self, tasks: Sequence[TaskId]) -> None:
        """Raise StartError if a task's TF_CONFIG is too long for the kernel."""
        longest = max(len(f"TF_CONFIG={self.tf_config(task)}") + 1 for task in tasks)
        if longest > MAX_ENV_STRING_BYTES:
            raise StartError(
                f"TF_CONFIG would be {longest} bytes long, but the kernel takes at "
                f"most {MAX_ENV_STRING_BYTES} in one environment variable",
                hint="use fewer tasks or shorter host names (or IP addresses)",
            )


def cluster(addresses: Sequence[tuple[TaskId, str]]) -> Cluster:
    """The cluster of these tasks; ``addresses`` are ``host:port`` in listing order."""
    jobs: dict[str, list[str]] = {}
    for task, address in addresses:
        if task.type in _IN_CLUSTER:
            jobs.setdefault(task.type, []).append(address)
    text = json.dumps(jobs, separators=(",", ":"))
    return Cluster({kind: tuple(found) for kind, found in jobs.items()}, text)


def device_filters(task: TaskId, strategy: Strategy, *, has_ps: bool) -> list[str]:
    """The device filters of a task's server or session; empty: it sees all devices.

    Workers that share parameter servers do not need to see each other, and a missing
    worker cannot hold up a worker that does not see it.
    """
    independent = strategy in _BETWEEN_GRAPHS
    if not has_ps or not independent or not task.ranked:
        return []
    return ["/job:ps", f"/job:{task.type}/task:{task.index}"]
