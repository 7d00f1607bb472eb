"""The words of the lifecycle: events come in, actions go out, the state is between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from tfcluster.errors import ExitCode
from tfcluster.model import TaskId
from tfcluster.states import RunState, TaskState


class Role(Enum):
    """What a task's end means for the run."""

    TRAINING = "training"  # its success is needed, its failure ends the run
    SERVER = "server"  # runs until it is stopped; an end before that is a failure
    EVALUATOR = "evaluator"  # outside the training: a failure is only a warning


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What stays the same for the whole run."""

    tasks: Mapping[TaskId, str]
    """Every task and its host, in listing order."""
    roles: Mapping[TaskId, Role]
    grace_s: float = 10.0
    start_timeout_s: float = 300.0
    max_restarts: int = 0
    restart_alone: bool = False
    """A failed task is started again by itself, not together with all others."""
    keepers: frozenset[TaskId] = frozenset()
    """Tasks with what all others have come to: without it all start again."""
    apart: frozenset[TaskId] = frozenset()
    """Tasks that are started again by themselves in any case."""
    spare: frozenset[TaskId] = frozenset()
    """Of those, the ones whose work is done by what is left of them, if need be."""
    min_training: int | None = None
    """A restart may leave hosts out as long as so many training tasks are left."""

    def hosts(self) -> tuple[str, ...]:
        """Each that has a task, once."""
        return tuple(dict.fromkeys(self.tasks.values()))

    listeners: frozenset[TaskId] = frozenset()
    """Tasks that count as started once they listen."""
    must_exchange: frozenset[TaskId] = frozenset()
    """Tasks that have not succeeded unless they exchanged something with others."""


# --- events -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostReady:
    """Its agent has said hello, holds the ports and has imported what there is to."""

    host: str


@dataclass(frozen=True, slots=True)
class HostFailed:
    """It could not be made ready."""

    host: str
    cause: str
    exit_code: ExitCode = ExitCode.START
    tail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HostLost:
    """Contact to it ended although nobody had asked for that."""

    host: str
    cause: str
    harmless_after_s: float = 0.0
    """Only then has an agent that may still live ended its tasks."""


@dataclass(frozen=True, slots=True)
class HostTold:
    """Somebody told the host's agent, where it is, to end (SIGTERM): not we."""

    host: str


@dataclass(frozen=True, slots=True)
class HostClosed:
    """Its agent stopped everything and left."""

    host: str


@dataclass(frozen=True, slots=True)
class TaskStarted:
    task: TaskId
    attempt: int


@dataclass(frozen=True, slots=True)
class TaskListening:
    task: TaskId
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskExited:
    task: TaskId
    attempt: int
    code: int | None
    signal: str | None = None
    cause: str | None = None
    """One sentence for people; None where it ended well."""
    tail: tuple[str, ...] = ()
    stopped: bool = False
    """It was told to."""
    victim: bool = False
    """It looks as if it failed because of another task's failure."""
    exchanged: bool = False
    """It has exchanged gradients, or whatever its strategy exchanges, with others."""
    at_s: float = 0.0
    """When it ended, by whatever clock measures all ends of the run."""


@dataclass(frozen=True, slots=True)
class TaskSettled:
    """Nothing of what it had started is left."""

    task: TaskId
    attempt: int


@dataclass(frozen=True, slots=True)
class TaskUnstartable:
    """It could not be started, or something else has its port."""

    task: TaskId
    attempt: int
    cause: str


@dataclass(frozen=True, slots=True)
class Replanned:
    """Answers ``Replan``: who runs where from now on."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Somebody wants the run to end; ``exit_code`` says who."""

    exit_code: ExitCode


@dataclass(frozen=True, slots=True)
class Stalled:
    """Training tasks made no step for too long; ``cause`` names who waits for whom."""

    cause: str
    tail: tuple[str, ...] = ()
    """Where the one that the others wait for is."""


@dataclass(frozen=True, slots=True)
class LauncherFault:
    """The launcher itself cannot go on."""

    cause: str
    exit_code: ExitCode = ExitCode.RESOURCES


@dataclass(frozen=True, slots=True)
class Expired:
    """A deadline that an action had set has passed."""

    deadline: str


Event = (
    HostReady
    | HostFailed
    | HostLost
    | HostTold
    | HostClosed
    | TaskStarted
    | TaskListening
    | TaskExited
    | TaskSettled
    | TaskUnstartable
    | Replanned
    | Interrupted
    | Stalled
    | LauncherFault
    | Expired
)


# --- actions ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartTasks:
    """Compose and start these tasks, each in its current attempt."""

    tasks: tuple[TaskId, ...]
    attempts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replan:
    """Plan again for the hosts that are left, and say so (``Replanned``)."""

    hosts: frozenset[str]


@dataclass(frozen=True, slots=True)
class StopTasks:
    """``signal`` to each task's processes now, KILL after ``grace_s`` (0: now)."""

    tasks: tuple[TaskId, ...]
    signal: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class CloseHosts:
    """Have these hosts' agents stop what is left, sweep and leave."""

    hosts: tuple[str, ...]
    grace_s: float


@dataclass(frozen=True, slots=True)
class DropHosts:
    """End the contact to these hosts, and sweep them by other means if possible."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetDeadline:
    """Deliver ``Expired(name)`` then, in place of an earlier deadline of the name."""

    name: str
    after_s: float


@dataclass(frozen=True, slots=True)
class ClearDeadline:
    name: str


@dataclass(frozen=True, slots=True)
class Say:
    """For the person who launched the run."""

    text: str


@dataclass(frozen=True, slots=True)
class SetRunState:
    """The run's state changed; for the record."""

    state: RunState
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTaskState:
    """A task's state changed; for the record."""

    task: TaskId
    attempt: int
    state: TaskState
    exit_code: int | None = None
    signal: str | None = None
    cause: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failure, for the record: the first one is the verdict on the run."""

    task: TaskId | None
    host: str | None
    cause: str
    exit_code: int | None = None
    signal: str | None = None
    tail: tuple[str, ...] = ()
    secondary: bool = False
    at_s: float = 0.0
    run_exit_code: ExitCode = ExitCode.TASK_FAILED
    again: bool = True
    """The task might end otherwise if it were started again."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing is left to do. ``exit_code`` is ours, or the tasks' own: ``codes``."""

    state: RunState
    exit_code: int


Action = (
    StartTasks
    | Replan
    | StopTasks
    | CloseHosts
    | DropHosts
    | SetDeadline
    | ClearDeadline
    | Say
    | SetRunState
    | SetTaskState
    | Failure
    | Finish
)


# --- state --------------------------------------------------------------------------


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
    """What it had started itself is gone, too."""


class Phase(Enum):
    """Where the run is. ``ENDING`` has stages of its own, see ``State.stage``."""

    GATHERING = "gathering"  # until every host is ready
    TRAINING = "training"
    RESTARTING = "restarting"  # until all tasks of the old attempt have ended
    REPLANNING = "replanning"  # then, if hosts are lost: until the new plan is there
    ENDING = "ending"
    OVER = "over"


class Stage(Enum):
    """The order of the end: those who use servers first, then servers, then agents."""

    TASKS = "tasks"
    SERVERS = "servers"
    HOSTS = "hosts"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    plan: Plan
    hosts: Mapping[str, HostState]
    tasks: Mapping[TaskId, TaskStatus]
    phase: Phase = Phase.GATHERING
    stage: Stage = Stage.TASKS
    started: bool = False
    """Every task has been up once: the start timeout is over."""
    pending: tuple[Failure, ...] = ()
    """Failures that arrived within moments; the first cause among them is sought."""
    verdict: Failure | None = None
    interrupts: int = 0
    interrupted: ExitCode | None = None
    restarts: int = 0
    restarting: frozenset[TaskId] = frozenset()
    """Tasks to start again once all of them have ended."""
    awaiting: frozenset[str] = frozenset()
    """Lost hosts whose tasks may still run; no restart before their time is over."""
    signal: str = "TERM"
    killing: bool = False
    success: bool = False
    exchanged: frozenset[TaskId] = frozenset()
    """Tasks that have exchanged something, in any of their attempts."""
    codes: frozenset[int | None] = frozenset()
    """Exit codes of the tasks that failed by themselves; None: killed by a signal."""
