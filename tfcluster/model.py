"""What a cluster is, as plain frozen data: the words that every other module shares.

Nothing here reads files, environments or clocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

RANKED_TYPES = ("chief", "worker")
"""Task types that train together, in rank order: chief, then worker 0, 1, ..."""

TASK_TYPES = (*RANKED_TYPES, "ps", "evaluator", "data")
"""Every task type, in the order in which tasks are listed."""

BUILT_IN_SERVERS = ("ps", "data")
"""Task types that run a server of tfcluster's own instead of the command."""

BACKENDS = ("local", "ssh", "slurm", "sge")


class Strategy(str, Enum):
    """How the training tasks work together."""

    COLLECTIVE = "collective"
    PARAMETER_SERVER = "parameter_server"
    REPLICATED = "replicated"
    LOCAL_SGD = "local_sgd"
    NONE = "none"

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True)
class TaskId:
    """One task: ``worker:0``. The index is counted within the type."""

    type: str
    index: int

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"

    @property
    def ranked(self) -> bool:
        return self.type in RANKED_TYPES

    @property
    def log_name(self) -> str:
        return f"{self.type}-{self.index}.log"

    @classmethod
    def parse(cls, text: str) -> TaskId:
        """The task that ``worker:0`` names. Raises ValueError for any other form."""
        kind, colon, index = text.partition(":")
        if kind not in TASK_TYPES or not colon or not index.isdecimal():
            raise ValueError(f"{text!r} is not TYPE:INDEX")
        return cls(kind, int(index))


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """Where a secret environment variable comes from; exactly one is given."""

    file: Path | None = None
    env: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGroup:
    """All tasks of one type."""

    count: int = 1
    gpus: int | None = None
    """GPUs for each task; None takes an even share of what its host has."""
    env: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] | None = None
    server: bool = False
    """A built-in TensorFlow server stands in for the command."""
    min: int | None = None
    """So many are enough to go on with when a host is lost; None: all are needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    strategy: Strategy = Strategy.COLLECTIVE
    transport: str = "auto"
    bucket_mb: float = 25.0
    compression: str = "none"
    batch: str = "global"
    data: str = "shared"
    """shared | seed_offset: each rank has all data, in a random order of its own."""
    sync_every: int | None = None
    """local_sgd: steps between averagings (100 where neither is given)."""
    sync_seconds: float | None = None
    synchronous: bool = False
    chief_only: tuple[str, ...] = ("summary",)
    """print | summary: what other ranks leave undone."""
    warm_start: bool = True
    stall_warning_s: float | None = 60.0
    """So late, a rank is asked where it is; None: never."""
    stall_timeout_s: float | None = 1800.0
    """So late, a rank is given up; None: never. It may be saving or compiling."""
    require_exchange: bool = True
    """A training task that has exchanged nothing with the others has not succeeded."""

    @property
    def divides(self) -> bool:
        """The program's batch is that of all ranks, who divide it among them."""
        return self.batch == "global" and self.data == "shared"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEntry:
    """One host of the ``hosts:`` list. None means: ask the host, or its defaults."""

    host: str
    slots: int | None = None
    gpus: int | None = None
    address: str | None = None
    user: str | None = None
    port: int | None = None
    python: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ssh:
    user: str | None = None
    port: int | None = None
    identity_file: Path | None = None
    config_file: Path | None = None
    known_hosts: Path | None = None
    connect_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    nodes: int | None = None
    tasks_per_node: int | None = None
    partition: str | None = None
    time: str | None = None
    gpus_per_node: int | None = None
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sge:
    parallel_environment: str | None = None
    slots: int | None = None
    queue: str | None = None
    resources: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    max: int = 0
    """How many times in all tasks may be started again after a failure."""
    scope: str = "auto"
    """auto | job | task: all tasks start again, or only the one that failed."""


@dataclass(frozen=True, slots=True)
class PortRange:
    """Ports ``low`` to ``high``, both included."""

    low: int
    high: int

    def __len__(self) -> int:
        return self.high - self.low + 1


@dataclass(frozen=True, slots=True)
class Sync:
    """The workdir's files are copied to hosts that do not share them."""

    folder: str
    """Where to, on each host; relative to the user's home there."""
    exclude: tuple[str, ...]
    """Names and paths that stay behind, as shell patterns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A checked cluster.yaml, with every default filled in and every path absolute."""

    name: str
    named: bool
    """The name was given, so that one active run holds it; else it is the stem."""
    backend: str
    command: tuple[str, ...]
    workdir: Path
    python: str
    """Interpreter on the hosts that a leading ``python`` of a command means."""
    env: Mapping[str, str]
    secrets: Mapping[str, Secret]
    tasks: Mapping[str, TaskGroup]
    """By type, in the order of TASK_TYPES; types without tasks are left out."""
    runtime: Runtime
    hosts: tuple[HostEntry, ...]
    ssh: Ssh
    slurm: Slurm
    sge: Sge
    launcher: str
    ports: PortRange | None
    """None: the agents choose."""
    restart: Restart
    start_timeout_s: float
    progress_timeout_s: float | None
    grace_s: float
    sync: Sync | None = None
    source: str = "<command line>"
    """What was read, as messages call it."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Dotted key -> ``file:line:column`` or ``--set``; a default has no entry."""

    def task_ids(self) -> tuple[TaskId, ...]:
        """Every task in listing order: ranks first, then ps, evaluator, data."""
        return tuple(
            TaskId(kind, index)
            for kind in TASK_TYPES
            if kind in self.tasks
            for index in range(self.tasks[kind].count)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host of an allocation: what a backend says of it, and no more."""

    name: str
    address: str | None = None
    """What other hosts of the cluster reach it by; None: nobody has said so yet."""
    slots: int | None = None
    """How many tasks it takes; None: as many as there are."""
    gpus: tuple[str, ...] | None = None
    """Device names as CUDA_VISIBLE_DEVICES takes them; None: unknown, hands off."""
    python: str | None = None
    """Its own interpreter, where that is not the description's."""

    @property
    def reached_by(self) -> str:
        """The address, or the name as long as there is none."""
        return self.name if self.address is None else self.address


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The hosts that a backend has, in its own order (never sorted as text)."""

    hosts: tuple[Host, ...]
    provisional: bool = False
    """The hosts are placeholders: the scheduler has not chosen yet."""
