"""The types of the lifecycle: events that come in, actions that go out, the state."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from tfcluster.base.errors import ExitCode
from tfcluster.base.light_dataclasses import dataclass
from tfcluster.base.states import RunState, TaskState
from tfcluster.base.task_id import TaskId


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
        """The hosts that have a task, each once."""
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


# --- events -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostReady:
    """The host's agent has said hello and holds the ports; its warm interpreters are
    ready."""

    host: str


@dataclass(frozen=True, slots=True)
class HostFailed:
    """The host could not be prepared."""

    host: str
    cause: str
    exit_code: ExitCode = ExitCode.START
    tail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HostLost:
    """Contact with the host ended unexpectedly."""

    host: str
    cause: str
    harmless_after_s: float = 0.0
    """Seconds until an agent that is still alive has certainly ended its tasks."""


@dataclass(frozen=True, slots=True)
class AgentAskedToStop:
    """Somebody else told the host's agent to end, by SIGTERM on that host."""

    host: str


@dataclass(frozen=True, slots=True)
class HostClosed:
    """The host's agent stopped everything and exited."""

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
    """One sentence for people; None if the task ended well."""
    tail: tuple[str, ...] = ()
    stopped: bool = False
    """Whether the task was told to end."""
    victim: bool = False
    """Whether it looks as if the task failed because of another task's failure."""
    exchanged: bool = False
    """Whether it has exchanged gradients (or what its strategy exchanges) with other
    tasks."""
    at_s: float = 0.0
    """When the task ended, by one clock for all ends of the run."""


@dataclass(frozen=True, slots=True)
class TaskSettled:
    """No process that the task started is left."""

    task: TaskId
    attempt: int


@dataclass(frozen=True, slots=True)
class TaskUnstartable:
    """The task could not be started, or something else has its port."""

    task: TaskId
    attempt: int
    cause: str


@dataclass(frozen=True, slots=True)
class Replanned:
    """The answer to ``Replan``: the plan from now on."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class HostAdded:
    """A host that has no task yet is being prepared; its loss harms nobody."""

    host: str


@dataclass(frozen=True, slots=True)
class Resize:
    """All training tasks must restart now, with a new plan."""

    cause: str
    """One sentence for people."""


@dataclass(frozen=True, slots=True)
class ResultsFetched:
    """The answer to ``FetchResults``: everything that can be fetched was fetched."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The run was told to end; ``exit_code`` says how."""

    exit_code: ExitCode


@dataclass(frozen=True, slots=True)
class Stalled:
    """Training made no step for too long; ``cause`` names who waits for whom."""

    cause: str
    tail: tuple[str, ...] = ()
    """The stack of the task that the others wait for."""


@dataclass(frozen=True, slots=True)
class LauncherFault:
    """The launcher itself cannot continue."""

    cause: str
    exit_code: ExitCode = ExitCode.RESOURCES


@dataclass(frozen=True, slots=True)
class Expired:
    """A deadline set by ``SetDeadline`` has passed."""

    deadline: str


Event = (
    HostReady
    | HostFailed
    | HostLost
    | AgentAskedToStop
    | HostClosed
    | TaskStarted
    | TaskListening
    | TaskExited
    | TaskSettled
    | TaskUnstartable
    | Replanned
    | HostAdded
    | Resize
    | ResultsFetched
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
    """Make a plan for the remaining ``hosts``; answer with ``Replanned``."""

    hosts: frozenset[str]


@dataclass(frozen=True, slots=True)
class StopTasks:
    """Send ``signal`` to each task's processes now, and KILL after ``grace_s``."""

    tasks: tuple[TaskId, ...]
    signal: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class FetchResults:
    """Fetch files from these hosts; answer with ``ResultsFetched``.

    With ``not_now``, fetch nothing, note this reason, and do not answer.
    """

    hosts: tuple[str, ...]
    not_now: str | None = None


@dataclass(frozen=True, slots=True)
class LeaveResults:
    """End a fetch; what has not been fetched stays on the hosts."""

    why: str


@dataclass(frozen=True, slots=True)
class CloseHosts:
    """Have these hosts' agents stop what is left, sweep and exit."""

    hosts: tuple[str, ...]
    grace_s: float


@dataclass(frozen=True, slots=True)
class DropHosts:
    """End contact with these hosts; sweep them through new agents if possible."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetDeadline:
    """Deliver ``Expired(name)`` after this time; replaces a deadline of that name."""

    name: str
    after_s: float


@dataclass(frozen=True, slots=True)
class ClearDeadline:
    name: str


@dataclass(frozen=True, slots=True)
class Say:
    """Tell something to the person who launched the run."""

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

    cause: str
    task: TaskId | None = None
    host: str | None = None
    exit_code: int | None = None
    signal: str | None = None
    tail: tuple[str, ...] = ()
    secondary: bool = False
    at_s: float = 0.0
    run_exit_code: ExitCode = ExitCode.TASK_FAILED
    again: bool = True
    """Whether a restart of the task might succeed."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing is left to do. ``exit_code`` is what the launcher exits with."""

    state: RunState
    exit_code: int


Action = (
    StartTasks
    | Replan
    | StopTasks
    | FetchResults
    | LeaveResults
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
