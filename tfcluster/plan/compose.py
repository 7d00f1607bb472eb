"""From a placement to each task's argv, environment and TF_CONFIG.

Pure: ports, secrets and the run's identity are arguments. Whatever the tasks of a group
share is computed once.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import PurePath

from tfcluster.base.errors import StartError
from tfcluster.base.isolated_import import PACKAGE_ROOT, module_argv
from tfcluster.base.light_dataclasses import as_dict, dataclass, replace
from tfcluster.base.task_id import TaskId
from tfcluster.base.vocabulary import BUILT_IN_SERVERS, RANKED_TYPES
from tfcluster.plan.model import Description, Interpreter, Runtime, Strategy
from tfcluster.plan.placement import Place

_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
# python(1): flags may be joined (-uB); the last letter of a word may take a value,
# which is the rest of that word or the next word.
_OPTION = re.compile(
    r"-(?P<flags>[bBdEhiIOPqRsSuvVx?]*)(?:(?P<valued>[mcWX])(?P<value>.*))?", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Program:
    argv: tuple[str, ...]
    python: Interpreter = ()
    """The interpreter; empty if the command is not known to be Python."""
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    """The arguments for ``tfcluster.runtime.task.bootstrap``, such as ``run train.py``.

    Empty if the command is not a Python program, which is executed as it is.
    """

    @property
    def forkable(self) -> bool:
        """Whether a warm interpreter can run it: no option changes the interpreter."""
        return bool(self.arguments) and set(self.options) <= {"-u"}


def parse(command: Sequence[str], python: Interpreter) -> Program:
    """Parse a command; ``python`` replaces a leading ``python`` or ``python3``."""
    head, rest = command[0], list(command[1:])
    if not _PYTHON.fullmatch(PurePath(head).name):
        return Program(argv=tuple(command))
    interpreter = python if head in ("python", "python3") else (head,)
    opaque = Program(argv=(*interpreter, *rest), python=interpreter)
    options: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "-m", "-c"):
        option = _OPTION.fullmatch(rest.pop(0))
        if option is None:
            return opaque
        flags, valued, value = option.group("flags", "valued", "value")
        if flags:
            options.append(f"-{flags}")
        if valued is None:
            continue
        if not value and not rest:
            return opaque
        words = [f"-{valued}", value or rest.pop(0)]
        if valued in "mc":
            rest[:0] = words
            break
        options += words
    if not rest or rest[0] == "-" or (rest[0] in ("-m", "-c") and len(rest) < 2):
        return opaque
    return Program(opaque.argv, interpreter, tuple(options), ("run", *rest))


AUTO, HOST, TENSORFLOW = "auto", "host", "tensorflow"


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport, and why it was chosen, as a part of a sentence."""

    transport: str
    """The transport; ``auto`` if it cannot be known yet."""
    reason: str


def chosen_transport(runtime: Runtime, places: Sequence[Place]) -> Choice:
    """The transport; auto: tensorflow if each rank has its own GPU, else host."""
    if runtime.transport != AUTO:
        return Choice(runtime.transport, "as configured")
    if obstacle := _obstacle(runtime):
        return Choice(HOST, obstacle)
    ranks = [place for place in places if place.rank is not None]
    if len(ranks) < 2:
        return Choice(HOST, "there is only one rank")
    for place in ranks:
        if place.gpus == () or (place.gpus is None and place.host.gpus == ()):
            return Choice(HOST, f"{place.task} has no GPU")
    owners: dict[tuple[str, str], Place] = {}
    for place in ranks:
        for gpu in place.gpus_of_machine:
            other = owners.setdefault(gpu, place)
            if other is not place:
                shared = f"share GPU {gpu[1]} of {place.host.name}"
                return Choice(HOST, f"{other.task} and {place.task} {shared}")
    if any(place.gpus is None for place in ranks):
        return Choice(AUTO, "the GPUs of the hosts are not known yet")
    return Choice(TENSORFLOW, "each rank has a GPU to itself")


def _obstacle(runtime: Runtime) -> str:
    """Why ``auto`` is ``host`` on any GPUs; empty: nothing prevents ``tensorflow``."""
    if runtime.strategy is not Strategy.COLLECTIVE:
        return f"the strategy is {runtime.strategy}"
    if runtime.shards is not None:
        return "runtime.shards adds gradients in its own order"
    if runtime.shard_tables is not None:
        return "runtime.shard_tables needs it"
    return "runtime.error_feedback needs it" if runtime.error_feedback else ""


BOOTSTRAP = "tfcluster.runtime.task.bootstrap"
WARM = "tfcluster.runtime.warm.preloader"
BELOW = "below-wrapper"
"""Tells the bootstrap that a wrapper may have changed the environment."""

UNKNOWN_PORT = "auto"
"""Stands for the port in a plan's addresses: agents choose ports when they start."""

ALLOW_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
"""Makes TensorFlow take a GPU's memory in parts, instead of all when it starts."""

NO_PORT = ("evaluator",)
"""Task types that nobody connects to."""

PARAMETER_SERVICE = (Strategy.PARAMETER_SERVER, Strategy.REPLICATED)
"""Strategies under which ps tasks keep the variables for training tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """One task before any host is contacted; most is the same for its type."""

    place: Place
    program: Program
    on_host_python: bool
    """Whether the host's own interpreter, if it has one, replaces the program's."""
    warm: str | None
    """The key of the warm interpreter that forks the task; None: it is executed."""
    cwd: str
    server: bool
    """Whether the task is a built-in server, which runs until it is stopped."""
    strategy: Strategy
    shared_env: Mapping[str, str]
    """Variables that all tasks of the type have in common; one object for all."""
    sees_only_ps: bool
    """Whether it sees no devices but those of ps tasks and its own.

    Workers that share parameter servers do not need to see each other, and a missing
    worker cannot hold up a worker that does not see it.
    """
    has_own_gpu: bool = False
    """Whether each rank has a GPU to itself, and may reduce gradients there."""
    shares_gpu: bool = False
    """Whether another task uses a GPU of this task, too."""

    @property
    def task(self) -> TaskId:
        return self.place.task

    @property
    def python(self) -> Interpreter:
        """The interpreter; empty if the command is not known to be Python."""
        own = self.place.host.task_python if self.on_host_python else None
        return own or self.program.python

    @property
    def argv(self) -> tuple[str, ...]:
        """The command as a person would run it by hand."""
        return (*self.python, *self.program.argv[len(self.program.python) :])

    @property
    def arguments(self) -> tuple[str, ...]:
        """The bootstrap's arguments; if empty, ``argv`` is executed as it is."""
        return self.program.arguments

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
    def wrapped(self) -> bool:
        """Whether the task trains below a command that is not a Python program."""
        return self.trains and not self.arguments

    @property
    def device_filters(self) -> list[str]:
        """The device filters of its server or session; empty: it sees all devices."""
        if not self.sees_only_ps:
            return []
        return ["/job:ps", f"/job:{self.task.type}/task:{self.task.index}"]

    @property
    def own_env(self) -> dict[str, str]:
        place, filters = self.place, self.device_filters
        env = {"TFCLUSTER_TASK": str(self.task)}
        if place.rank is not None:
            # Local and cross ranks and sizes are as Horovod defines them.
            env |= {
                "TFCLUSTER_RANK": str(place.rank),
                "TFCLUSTER_SIZE": str(place.size),
                "TFCLUSTER_LOCAL_RANK": str(place.local_rank),
                "TFCLUSTER_LOCAL_SIZE": str(place.local_size),
                "TFCLUSTER_CROSS_RANK": str(place.cross_rank),
                "TFCLUSTER_CROSS_SIZE": str(place.cross_size),
            }
        if place.gpus is not None:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(place.gpus)
        if filters:
            env["TFCLUSTER_DEVICE_FILTERS"] = json.dumps(filters)
        if self.has_own_gpu:
            env["TFCLUSTER_OWN_GPUS"] = "1"
        # Otherwise, the first task on a GPU would take all of its memory.
        if self.shares_gpu and ALLOW_GROWTH not in self.shared_env:
            env[ALLOW_GROWTH] = "true"
        return env

    def cold_argv(self, root: str = PACKAGE_ROOT) -> tuple[str, ...]:
        """The argv that starts the task without a warm interpreter."""
        plain = self.strategy is Strategy.NONE and not self.server
        if plain or not self.arguments or not self.python:
            return self.argv
        words = self.arguments if len(self.python) == 1 else (BELOW, *self.arguments)
        return module_argv(
            self.python, BOOTSTRAP, *words, options=self.program.options, root=root
        )


UsesTensorFlow = Callable[[Program], bool]


def compose(
    description: Description, places: Sequence[Place], uses_tensorflow: UsesTensorFlow
) -> tuple[TaskSpec, ...]:
    """The TaskSpec of every task, in listing order."""
    by_type = {placed.task.type: placed for placed in places}
    examples = [_spec(description, p, uses_tensorflow) for p in by_type.values()]
    return place_specs(description.runtime, examples, places)


def place_specs(
    runtime: Runtime, examples: Iterable[TaskSpec], places: Sequence[Place]
) -> tuple[TaskSpec, ...]:
    """The tasks at these places; each is like the example of its type.

    Whether ``transport: auto`` may choose ``tensorflow`` is decided once for all ranks.
    Tasks that share a GPU take its memory as they need it.
    """
    by_type = {spec.task.type: spec for spec in examples}
    choice = chosen_transport(runtime, places)
    own = runtime.transport == AUTO and choice.transport == TENSORFLOW
    users = Counter(gpu for placed in places for gpu in placed.gpus_of_machine)
    return tuple(
        replace(
            by_type[placed.task.type],
            place=placed,
            has_own_gpu=own and placed.rank is not None,
            shares_gpu=any(users[gpu] > 1 for gpu in placed.gpus_of_machine),
        )
        for placed in places
    )


def _spec(
    description: Description, place: Place, uses_tensorflow: UsesTensorFlow
) -> TaskSpec:
    """The TaskSpec of a task, except for what depends on the GPUs of all tasks."""
    kind, python, runtime = place.task.type, description.python, description.runtime
    groups = description.tasks
    group = groups[kind]
    server = group.server or kind in BUILT_IN_SERVERS
    if server:
        argv = (*python, "-m", BOOTSTRAP, "server")
        parsed = Program(argv=argv, python=python, arguments=("server",))
    else:
        parsed = parse(group.command or description.command, python)
    warm = None
    if runtime.warm_start and parsed.forkable and (server or uses_tensorflow(parsed)):
        # Modules read the environment at import, and a fork inherits the result:
        # another interpreter or environment needs a separate warm interpreter.
        warm = json.dumps([parsed.python, sorted(group.env.items())])
    strategy = Strategy.NONE if kind == "evaluator" else runtime.strategy
    # With built-in servers as workers, the chief's graph spans all tasks, so it must
    # see all of their devices.
    driven = any(groups[ranked].server for ranked in RANKED_TYPES if ranked in groups)
    with_ps = "ps" in groups and kind in RANKED_TYPES and not driven
    return TaskSpec(
        place=place,
        program=parsed,
        on_host_python=parsed.python == python,
        warm=warm,
        cwd=str(description.workdir),
        server=server,
        strategy=strategy,
        shared_env=_shared_env(description, kind, strategy),
        sees_only_ps=with_ps and strategy in _BETWEEN_GRAPHS,
    )


def _shared_env(
    description: Description, kind: str, strategy: Strategy
) -> dict[str, str]:
    runtime = as_dict(description.runtime)
    env = {
        **description.env,
        **description.tasks[kind].env,
        "TFCLUSTER_STRATEGY": str(strategy),
        "TFCLUSTER_RUNTIME": json.dumps(runtime, default=str, separators=(",", ":")),
        "TF_GRPC_REUSE_PORT": "true",
    }
    env.setdefault("PYTHONUNBUFFERED", "1")
    if strategy is not Strategy.NONE:
        # A set of strings must iterate in the same order on every rank. Otherwise,
        # ranks that number its members silently train on different data.
        env.setdefault("PYTHONHASHSEED", "0")
    return env


def warm_specs(specs: Iterable[TaskSpec]) -> dict[str, TaskSpec]:
    """The warm interpreters of a host: key -> one of its tasks."""
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
    jobs: dict[str, list[str]] = {}
    for spec in specs:
        if spec.task.type in _IN_CLUSTER:
            listed = jobs.setdefault(spec.task.type, [])
            listed.append(address(spec.place, ports.get(spec.task)))
    return Cluster({kind: tuple(listed) for kind, listed in jobs.items()})


def provisional_cluster(specs: Sequence[TaskSpec]) -> Cluster:
    """The ClusterSpec for a plan. Raises StartError if TF_CONFIG would be too long."""
    widest = cluster_of(specs, {spec.task: 65535 for spec in specs})
    last = {spec.task.type: spec.task for spec in specs}
    widest.require_fit(tuple(last.values()))
    return cluster_of(specs, {})


# execve(2): an environment string, with its final NUL, is limited to 32 pages.
MAX_ENV_STRING_BYTES = 131_072

_IN_CLUSTER = ("chief", "worker", "ps")
"""The task types of TensorFlow's cluster, to which evaluator and data do not belong."""

_BETWEEN_GRAPHS = (Strategy.PARAMETER_SERVER, Strategy.REPLICATED, Strategy.NONE)
"""Strategies under which each worker has its own graph. With ``none``, the script
decides, and TensorFlow's own strategies set their own filters."""


@dataclass(frozen=True)
class Cluster:
    """The ``cluster`` part of TF_CONFIG."""

    jobs: Mapping[str, tuple[str, ...]]
    """Addresses by task type."""

    @cached_property
    def _text(self) -> str:
        return json.dumps(self.jobs, separators=(",", ":"))

    def tf_config(self, task: TaskId) -> str:
        return (
            f'{{"cluster":{self._text},'
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
