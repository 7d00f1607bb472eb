"""Transitions that several events share: start, stop, end; and small queries. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from tfcluster.base.light_dataclasses import replace
from tfcluster.base.states import RunState, TaskState
from tfcluster.base.task_id import TaskId
from tfcluster.lifecycle.types import (
    Action,
    ClearDeadline,
    CloseHosts,
    HostState,
    Phase,
    Role,
    SetDeadline,
    SetRunState,
    SetTaskState,
    Stage,
    StartTasks,
    State,
    StopTasks,
    TaskStatus,
)

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

Result = tuple[State, list[Action]]


def end(state: State, *, reason: str | None) -> Result:
    """Begin the shutdown: stop all tasks except servers; ``step`` does the rest."""
    if state.verdict is not None:
        reason = state.verdict.cause
    state = replace(state, phase=Phase.ENDING, stage=Stage.TASKS)
    state = replace(state, restarting=frozenset())
    state, actions = stop(state, Role.TRAINING, Role.EVALUATOR)
    begun = SetRunState(RunState.STOPPING, reason)
    return state, [ClearDeadline(VERDICT), begun, *actions]


def close(state: State, grace_s: float) -> list[Action]:
    left = tuple(h for h, s in state.hosts.items() if s is not HostState.GONE)
    if not left:
        return []
    return [CloseHosts(left, grace_s), SetDeadline(CLOSE, grace_s + CLOSE_SLACK_S)]


def start(state: State, tasks: Iterable[TaskId]) -> Result:
    chosen = tuple(tasks)
    actions: list[Action] = []
    for task in chosen:
        state, more = set_task(state, task, TaskState.STARTING)
        actions += more
    attempts = tuple(state.tasks[task].attempt for task in chosen)
    return state, [*actions, StartTasks(chosen, attempts)]


def stop(
    state: State,
    *roles: Role,
    among: frozenset[TaskId] | None = None,
    mark: Action | None = None,
) -> Result:
    """Stop all live tasks of these roles; ``mark`` is an action that comes first."""
    left = [
        task
        for role in roles
        for task in of(state, role)
        if alive(state.tasks[task]) and (among is None or task in among)
    ]
    actions: list[Action] = [] if mark is None else [mark]
    for task in left:
        if state.tasks[task].state is not TaskState.STOPPING:
            state, more = set_task(state, task, TaskState.STOPPING)
            actions += more
    if left:
        sign, grace_s = (
            ("KILL", 0.0) if state.killing else (state.signal, state.plan.grace_s)
        )
        actions.append(StopTasks(tuple(left), sign, grace_s))
        actions.append(SetDeadline(STOP, grace_s + UNKILLABLE_S))
    return state, actions


def of(state: State, role: Role) -> list[TaskId]:
    return [task for task in state.tasks if state.plan.roles[task] is role]


def alive(status: TaskStatus) -> bool:
    return status.state is not TaskState.PENDING and not status.state.final


def any_alive(state: State, *roles: Role) -> bool:
    return any(alive(state.tasks[task]) for role in roles for task in of(state, role))


def up(state: State, task: TaskId, status: TaskStatus) -> bool:
    if status.state.final:
        return True
    awaited = task in state.plan.listeners and not status.listening
    return status.state is TaskState.RUNNING and not awaited


def with_host(state: State, host: str, word: HostState) -> State:
    return replace(state, hosts={**state.hosts, host: word})


def with_task(state: State, task: TaskId, status: TaskStatus) -> State:
    return replace(state, tasks={**state.tasks, task: status})


def set_task(
    state: State,
    task: TaskId,
    word: TaskState,
    *,
    exit_code: int | None = None,
    signal: str | None = None,
    cause: str | None = None,
) -> Result:
    status = replace(state.tasks[task], state=word)
    note = SetTaskState(
        task=task,
        attempt=status.attempt,
        state=word,
        exit_code=exit_code,
        signal=signal,
        cause=cause,
    )
    return with_task(state, task, status), [note]
