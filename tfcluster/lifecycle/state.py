"""The state of a run, the plan for it, and what changes it: a turn. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from tfcluster.base.errors import ExitCode
from tfcluster.base.light_dataclasses import dataclass, replace
from tfcluster.base.states import RunState, TaskState
from tfcluster.base.task_id import TaskId
from tfcluster.lifecycle import actions
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


CLOSE_SLACK_S = 5.0
"""What an agent may need beyond the grace period to sweep and exit."""

UNKILLABLE_S = 30.0
"""How long after SIGKILL a process may take to end before it is given up."""

START, VERDICT, EVALUATOR = "start", "verdict", "evaluator"
STOP, CLOSE = "stop", "close"
BACKOFF = "backoff"
RESTART = "restart "
"""The prefix of the deadline when a restart no longer counts; its number follows."""
LEASE = "lease "
"""The prefix of a deadline; the name of the lost host follows."""


class Turn:
    """What one event leads to: the changed state, and the actions in their order."""

    def __init__(self, state: State) -> None:
        self.state = replace(state, hosts={**state.hosts}, tasks={**state.tasks})
        self.actions: list[actions.Action] = []

    def act(self, *actions: actions.Action) -> None:
        self.actions += actions

    def say(self, text: str) -> None:
        self.act(actions.Say(text))

    def end(self, *, reason: str | None) -> None:
        """Begin the shutdown: stop all tasks except servers; ``step`` does the rest."""
        state = self.state
        if state.verdict is not None:
            reason = state.verdict.cause
        state.phase, state.stage = Phase.ENDING, Stage.TASKS
        state.restarting = frozenset()
        self.act(
            actions.ClearDeadline(VERDICT),
            actions.SetRunState(RunState.STOPPING, reason),
        )
        self.stop(Role.TRAINING, Role.EVALUATOR)

    def close(self, grace_s: float) -> None:
        if hosts := remaining_hosts(self.state):
            deadline = actions.SetDeadline(CLOSE, grace_s + CLOSE_SLACK_S)
            self.act(actions.CloseHosts(hosts, grace_s), deadline)

    def start(self, tasks: Iterable[TaskId]) -> None:
        chosen = tuple(tasks)
        for task in chosen:
            self.set_task(task, TaskState.STARTING)
        attempts = tuple(self.state.tasks[task].attempt for task in chosen)
        self.act(actions.StartTasks(chosen, attempts))

    def stop(self, *roles: Role, among: frozenset[TaskId] | None = None) -> None:
        state = self.state
        left = tuple(
            task
            for role in roles
            for task in of(state, role)
            if alive(state.tasks[task]) and (among is None or task in among)
        )
        for task in left:
            if state.tasks[task].state is not TaskState.STOPPING:
                self.set_task(task, TaskState.STOPPING)
        if left:
            signal, grace_s = state.signal, state.plan.grace_s
            if state.killing:
                signal, grace_s = "KILL", 0.0
            self.act(actions.StopTasks(left, signal, grace_s))
            self.act(actions.SetDeadline(STOP, grace_s + UNKILLABLE_S))

    def set_task(
        self,
        task: TaskId,
        word: TaskState,
        *,
        exit_code: int | None = None,
        signal: str | None = None,
        cause: str | None = None,
    ) -> None:
        status = replace(self.state.tasks[task], state=word)
        self.state.tasks[task] = status
        self.act(
            actions.SetTaskState(
                task=task,
                attempt=status.attempt,
                state=word,
                exit_code=exit_code,
                signal=signal,
                cause=cause,
            )
        )


def remaining_hosts(state: State) -> tuple[str, ...]:
    """The hosts whose agents have not ended yet, as far as we know."""
    return tuple(h for h, word in state.hosts.items() if word is not HostState.GONE)


def of(state: State, role: Role) -> list[TaskId]:
    return [task for task in state.tasks if state.plan.roles[task] is role]


def alive(status: TaskStatus) -> bool:
    return status.state is not TaskState.PENDING and not status.state.final


def any_alive(state: State, *roles: Role) -> bool:
    return any(alive(state.tasks[task]) for role in roles for task in of(state, role))


def is_up(state: State, task: TaskId) -> bool:
    """Whether a task counts as started; one that has ended does, too."""
    status = state.tasks[task]
    if status.state.final:
        return True
    awaited = task in state.plan.listeners and not status.listening
    return status.state is TaskState.RUNNING and not awaited


def first_of(names: list[str]) -> str:
    """The names as a list in a sentence, of which long ones are cut."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{', '.join(names[:8])}{more}"
