"""The state of a run, and the plan for it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from tfcluster.base.errors import ExitCode
from tfcluster.base.light_dataclasses import dataclass
from tfcluster.base.states import TaskState
from tfcluster.base.task_id import TaskId
from tfcluster.lifecycle.actions import Failure


class Role(Enum):
    """What a task's end means for the run."""

    TRAINING = "training"  # must succeed; its failure ends the run
    SERVER = "server"  # runs until it is stopped; an end before that is a failure
    EVALUATOR = "evaluator"  # not part of the training: its failure is only a warning


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is fixed for the whole run, or until hosts are lost (``Replanned``)."""

    tasks: Mapping[TaskId, str]
    """Every task and its host, in listing order."""
    roles: Mapping[TaskId, Role]
    grace_s: float = 10.0
    start_timeout_s: float = 300.0
    max_restarts: int = 0
    restart_within_s: float | None = None
    """``max_restarts`` limits the restarts in this many seconds; None: in the run."""
    backoff_s: float = 0.0
    """How long the first restart waits. Each further one waits twice as long."""
    restart_alone: bool = False
    """Whether a failed task is restarted alone, not together with all others."""
    keepers: frozenset[TaskId] = frozenset()
    """Tasks that hold the state of the training: if one fails, all tasks restart."""
    apart: frozenset[TaskId] = frozenset()
    """Tasks that are always restarted alone."""
    spare: frozenset[TaskId] = frozenset()
    """The tasks of ``apart`` that the run does not need while others are alive."""
    min_training: int | None = None
    """A restart may leave out hosts if this many training tasks remain; None: never."""

    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.tasks.values()))

    listeners: frozenset[TaskId] = frozenset()
    """Tasks that count as started only once they listen on their port."""
    must_exchange: frozenset[TaskId] = frozenset()
    """Tasks that fail if they exit without having exchanged anything with others."""
    results: bool = False
    """Whether files are fetched from the hosts once all tasks have ended."""
    hurried: bool = False
    """Whether a scheduler that tells the run to end soon kills what is left of it."""
    requeues: bool = False
    """Whether the job starts again after the time limit, which is announced early
    enough."""


class HostState(Enum):
    STARTING = "starting"
    READY = "ready"
    GONE = "gone"  # failed, lost or closed


@dataclass(frozen=True, slots=True)
class TaskStatus:
    state: TaskState = TaskState.PENDING
    attempt: int = 0
    listening: bool = False
    settled: bool = False
    """Whether all processes that it started are gone, too."""


class Phase(Enum):
    """Where the run is. ``ENDING`` has several stages, see ``State.stage``."""

    GATHERING = "gathering"  # until every host is ready
    TRAINING = "training"
    RESTARTING = "restarting"  # until all tasks of the old attempt have ended
    REPLANNING = "replanning"  # then, if hosts were lost: until there is a new plan
    ENDING = "ending"
    OVER = "over"


class Stage(Enum):
    """The order of a shutdown: tasks that use servers, servers, results, agents."""

    TASKS = "tasks"
    SERVERS = "servers"
    RESULTS = "results"
    HOSTS = "hosts"


@dataclass(slots=True, kw_only=True)
class State:
    """Only a ``Turn`` changes it, and that a copy of its own."""

    plan: Plan
    hosts: dict[str, HostState]
    tasks: dict[TaskId, TaskStatus]
    phase: Phase = Phase.GATHERING
    stage: Stage = Stage.TASKS
    fetching: bool = False
    """Whether results are being fetched; only in ``Stage.RESULTS``."""
    started: bool = False
    """Whether every task has been up once: the start timeout no longer applies."""
    pending: tuple[Failure, ...] = ()
    """Failures since the verdict's deadline was set, for ``reach_verdict``."""
    verdict: Failure | None = None
    interrupts: int = 0
    interrupted: ExitCode | None = None
    restarts: int = 0
    counted: int = 0
    """How many of ``restarts`` count towards ``Plan.max_restarts``."""
    backing_off: bool = False
    """Whether a restart waits for the end of its ``Plan.backoff_s``."""
    restarting: frozenset[TaskId] = frozenset()
    """Tasks to restart once all of them have ended."""
    resizing: bool = False
    """Whether they restart with a new plan although no host was lost."""
    awaiting: frozenset[str] = frozenset()
    """Lost hosts whose tasks may still run; a restart waits for their leases."""
    signal: str = "TERM"
    killing: bool = False
    killed: frozenset[TaskId] = frozenset()
    """Tasks that had to be killed at the end of the grace of an interrupted run."""
    success: bool = False
    exchanged: frozenset[TaskId] = frozenset()
    """Tasks that have exchanged something, in any of their attempts."""
    codes: frozenset[int | None] = frozenset()
    """Exit codes of tasks that failed on their own; None: killed by a signal."""
