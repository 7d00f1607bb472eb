"""A cluster as plain frozen data: the vocabulary that all other modules share.

Nothing here reads files, environments or clocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from tfcluster.base.light_dataclasses import dataclass, field
from tfcluster.base.task_id import TaskId
from tfcluster.base.vocabulary import TASK_TYPES

Interpreter = tuple[str, ...]
"""How Python is started: a path or a name, or a command whose last word is one."""


class Strategy(str, Enum):
    """How the training tasks work together."""

    COLLECTIVE = "collective"
    PARAMETER_SERVER = "parameter_server"
    REPLICATED = "replicated"
    LOCAL_SGD = "local_sgd"
    NONE = "none"

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """Where a secret environment variable comes from; exactly one field is given."""

    file: Path | None = None
    env: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGroup:
    count: int = 1
    gpus: int | None = None
    """GPUs per task; None: an even share of its host's GPUs."""
    env: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] | None = None
    server: bool = False
    min: int | None = None
    """The number of tasks that suffices to continue after a host is lost; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The settings of ``runtime:``, which ``config.models`` explains."""

    strategy: Strategy = Strategy.COLLECTIVE
    transport: str = "auto"
    bucket_mb: float = 25.0
    compression: str = "none"
    error_feedback: bool = False
    batch: str = "global"
    shards: int | None = None
    """The number of parts of every batch, on any number of ranks; None: one part for
    each rank, and then the bits of the weights depend on the number of ranks."""
    shard_tables: int | None = None
    """Weights larger than this, in bytes, are divided by rows; None: none are."""
    shard_optimizer: bool = False
    """Whether each rank holds a piece of the optimizers' variables."""
    data: str = "shared"
    sync_every: int | None = None
    sync_seconds: float | None = None
    synchronous: bool = False
    chief_only: tuple[str, ...] = ("summary",)
    files: str = "auto"
    warm_start: bool = True
    stall_warning_s: float | None = 60.0
    """After this delay a late rank is asked for its stack; None: never."""
    stall_timeout_s: float | None = 1800.0
    require_exchange: bool = True
    trace: bool = False
    trace_steps: int | None = None

    @property
    def divides(self) -> bool:
        return self.batch == "global" and self.data == "shared"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host, with what the configuration, the scheduler or its agent says about it."""

    name: str
    """Unique in a run."""
    hostname: str | None = None
    """The host's own name, if several hosts have the same one; None: ``name``."""
    address: str | None = None
    """The address at which the cluster's other hosts reach it; None: unknown so far."""
    user: str | None = None
    port: int | None = None
    """User and port for SSH; None: see the settings of SSH."""
    slots: int | None = None
    """The number of tasks that it takes; None: any number."""
    gpus: tuple[str, ...] | None = None
    """Device names for CUDA_VISIBLE_DEVICES; None: unknown, do not set it."""
    python: Interpreter | None = None
    """The host's own interpreter; None: the Description's interpreter."""
    cpus: int | None = None
    """The number of cores; None: unknown."""
    machine: str | None = None
    """The first name of its machine, if several hosts are one machine."""
    prepared_python: Interpreter | None = None
    """The interpreter that its preparation has made or found; None: ``python``."""

    @property
    def own_name(self) -> str:
        return self.hostname or self.name

    @property
    def task_python(self) -> Interpreter | None:
        return self.prepared_python or self.python

    @property
    def machine_name(self) -> str:
        return self.machine or self.name

    @property
    def reached_by(self) -> str:
        return self.address or self.own_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Ssh:
    user: str | None = None
    port: int | None = None
    identity_file: Path | None = None
    config_file: Path | None = None
    known_hosts: Path | None = None
    connect_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The settings of ``restart:``, which ``config.models`` explains."""

    max: int = 0
    scope: str = "auto"
    within_s: float | None = None
    backoff_s: float = 0.0
    on_time_limit: str = "stop"

    @property
    def requeues(self) -> bool:
        return self.on_time_limit == "requeue"


@dataclass(frozen=True, slots=True)
class PortRange:
    low: int
    high: int

    def __len__(self) -> int:
        return self.high - self.low + 1


@dataclass(frozen=True, slots=True)
class Sync:
    """How the workdir's files are copied to hosts that do not share them."""

    folder: str
    """The destination on each host, relative to the user's home there."""
    exclude: tuple[str, ...]
    """Shell patterns of names and paths that are not copied."""


@dataclass(frozen=True, slots=True)
class Results:
    patterns: tuple[str, ...]
    all: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What bash runs once on each host before anything is imported."""

    lines: tuple[str, ...]
    file: str | None = None
    """The name of the file with the lines; None: they are in the configuration."""

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def failed(self, line: int | None, cause: str) -> str:
        """One sentence; ``line`` counts from 1, or is None if it is unknown."""
        name = self.file or "setup"
        if line is None or not 0 < line <= len(self.lines):
            return f"{name}: the lines {cause}"
        place = f"{name}:{line}" if self.file else f"setup line {line}"
        return f"{place}, `{self.lines[line - 1].strip()}`, {cause}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    file: str
    files: tuple[tuple[str, str], ...]
    """Names and texts of the file and the files it includes, as hosts get them."""
    local: tuple[Path, ...] = ()
    """Packages and folders of packages on this machine that they refer to."""
    editable: tuple[Path, ...] = ()
    system_site_packages: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A checked cluster.yaml, with every default filled in and every path absolute."""

    name: str
    named: bool
    """Whether the user gave the name; only one active run may hold such a name. If not,
    the name is the stem of the file's name."""
    backend: str
    command: tuple[str, ...]
    workdir: Path
    python: Interpreter
    """The interpreter on the hosts that a command's leading ``python`` stands for."""
    env: Mapping[str, str]
    secrets: Mapping[str, Secret]
    tasks: Mapping[str, TaskGroup]
    """By type, in the order of TASK_TYPES; types without tasks are left out."""
    runtime: Runtime
    hosts: tuple[Host, ...]
    ssh: Ssh
    launcher: str
    ports: PortRange | None
    """The ports for tasks; None: the agents choose the ports."""
    restart: Restart
    start_timeout_s: float
    progress_timeout_s: float | None
    grace_s: float
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Scheduler -> the settings in its section, as JSON types."""
    spread: bool = False
    """Whether each host gets one task before any host gets a second one."""
    expose: str = "run"
    """Who can connect to TensorFlow's servers: ``run`` (the run's hosts) or ``any``."""
    sync: Sync | None = None
    results: Results | None = None
    on_end: tuple[str, ...] = ()
    """The command that gets the outcome when the run is over; empty: none."""
    setup: Setup | None = None
    requirements: Requirements | None = None
    source: str = "<command line>"
    """The configuration's name in messages."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Dotted key -> ``file:line:column`` or ``--set``; defaults have no entry."""

    @property
    def prepares_hosts(self) -> bool:
        """Whether hosts have to do something before tasks can be started."""
        return self.setup is not None or self.requirements is not None

    @property
    def remedy(self) -> str:
        """What to do if a package is missing on a host."""
        if self.requirements is None:
            return "install it there, or set 'python' to another interpreter"
        return f"add it to {self.requirements.file}"

    def task_ids(self) -> tuple[TaskId, ...]:
        """Every task in listing order: ranks first, then ps, evaluator, data."""
        return tuple(
            TaskId(kind, index)
            for kind in TASK_TYPES
            if kind in self.tasks
            for index in range(self.tasks[kind].count)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The hosts that a scheduler gives us, in its own order (never sorted as text)."""

    hosts: tuple[Host, ...]
    more_slots: str | None = None
    """How to get more slots, if they do not suffice; None: in no special way."""
    more_gpus: str | None = None
    """What to do if tasks need GPUs and no host says which it has."""


def pattern_problem(pattern: str) -> str | None:
    """What is wrong with a pattern of results, as the end of a sentence; or None."""
    if pattern.startswith(("/", "~")):
        return "is not below the workdir"
    parts = pattern.removesuffix("/").split("/")
    if ".." in parts:
        return "leads out of the workdir"
    if "\0" in pattern or any(part in ("", ".") for part in parts):
        return "matches nothing"
    return None
