"""What happens to a run: the events that ``step`` takes."""

from __future__ import annotations

from tfcluster.base.errors import ExitCode
from tfcluster.base.light_dataclasses import dataclass
from tfcluster.base.task_id import TaskId
from tfcluster.lifecycle.state import Plan


@dataclass(frozen=True, slots=True)
class HostReady:
    """The host's agent said hello and holds the ports; warm interpreters are ready."""

    host: str


@dataclass(frozen=True, slots=True)
class HostFailed:
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
    cause: str
    exit_code: ExitCode = ExitCode.RESOURCES


@dataclass(frozen=True, slots=True)
class Expired:
    deadline: str


HostEvent = HostReady | HostFailed | HostLost | HostClosed
TaskEvent = TaskStarted | TaskListening | TaskExited | TaskSettled | TaskUnstartable
Event = (
    HostEvent
    | HostAdded
    | AgentAskedToStop
    | TaskEvent
    | Resize
    | Replanned
    | ResultsFetched
    | Interrupted
    | Stalled
    | LauncherFault
    | Expired
)
