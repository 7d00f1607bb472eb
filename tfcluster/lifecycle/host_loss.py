"""The loss of a host, and training that continues without it. Pure."""

from __future__ import annotations

from dataclasses import replace

from tfcluster.errors import ExitCode
from tfcluster.lifecycle.failures import enough_are_left, fail
from tfcluster.lifecycle.transitions import (
    LEASE,
    Result,
    end,
    set_task,
    start,
    with_host,
)
from tfcluster.lifecycle.types import (
    Action,
    DropHosts,
    Failure,
    HostLost,
    HostState,
    Phase,
    Replanned,
    Role,
    SetDeadline,
    State,
    TaskStatus,
)
from tfcluster.states import TaskState


def host_lost(event: HostLost, state: State) -> Result:
    """Its tasks are lost; the run ends, or continues on the remaining hosts."""
    if state.hosts[event.host] is HostState.GONE:
        return state, []
    state = with_host(state, event.host, HostState.GONE)
    actions: list[Action] = []
    for task, host in state.plan.tasks.items():
        status = state.tasks[task]
        if host != event.host or status.state.final:
            continue
        if status.state is TaskState.PENDING:
            state, more = set_task(state, task, TaskState.STOPPED)
        else:
            state, more = set_task(state, task, TaskState.LOST, cause=event.cause)
        actions += more
    if event.harmless_after_s:
        state = replace(state, awaiting=state.awaiting | {event.host})
        actions.append(SetDeadline(f"{LEASE}{event.host}", event.harmless_after_s))
    failure = Failure(
        task=None,
        host=event.host,
        cause=event.cause,
        run_exit_code=ExitCode.CONTACT_LOST,
    )
    actions.append(DropHosts((event.host,)))
    again = state.phase in (Phase.RESTARTING, Phase.REPLANNING)
    if again and not enough_are_left(state):
        state = replace(state, verdict=failure)
        state, more = end(state, reason=None)
        return state, [*actions, failure, *more]
    if state.phase is Phase.REPLANNING:
        state = replace(state, phase=Phase.RESTARTING)
    state, more = fail(state, failure)
    return state, [*actions, *more]


def replanned(event: Replanned, state: State) -> Result:
    """Start the new plan's tasks, each in its next attempt."""
    if state.phase is not Phase.REPLANNING:
        return state, []
    actions: list[Action] = []
    tasks = {}
    for task in event.plan.tasks:
        old = state.tasks[task]
        stays = event.plan.roles[task] is Role.EVALUATOR
        tasks[task] = old if stays else TaskStatus(attempt=old.attempt + 1)
    left_out = [
        task
        for task, status in state.tasks.items()
        if task not in tasks and status.state is not TaskState.LOST
    ]
    for task in left_out:
        state, more = set_task(
            state, task, TaskState.STOPPED, cause="dropped because a host was lost"
        )
        actions += more
    state = replace(state, plan=event.plan, tasks=tasks, phase=Phase.TRAINING)
    again = [task for task, s in tasks.items() if s.state is TaskState.PENDING]
    state, more = start(state, again)
    return state, [*actions, *more]
