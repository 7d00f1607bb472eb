"""What the launcher is to do: the actions that ``step`` gives."""

from __future__ import annotations

from tfcluster.base.errors import ExitCode
from tfcluster.base.light_dataclasses import dataclass
from tfcluster.base.states import RunState, TaskState
from tfcluster.base.task_id import TaskId


@dataclass(frozen=True, slots=True)
class StartTasks:
    tasks: tuple[TaskId, ...]
    attempts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replan:
    hosts: frozenset[str]


@dataclass(frozen=True, slots=True)
class StopTasks:
    """Send ``signal`` to each task's processes now, and KILL after ``grace_s``."""

    tasks: tuple[TaskId, ...]
    signal: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class FetchResults:
    """Fetch files, answer ``ResultsFetched``; with ``not_now``, note the reason."""

    hosts: tuple[str, ...]
    not_now: str | None = None


@dataclass(frozen=True, slots=True)
class LeaveResults:
    """End a fetch; what has not been fetched stays on the hosts."""

    why: str


@dataclass(frozen=True, slots=True)
class CloseHosts:
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
    state: RunState
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTaskState:
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
