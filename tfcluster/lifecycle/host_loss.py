"""The loss of a host, and training that continues without it. Pure."""

from __future__ import annotations

from tfcluster.errors import ExitCode
from tfcluster.lifecycle.failures import enough_are_left, fail
from tfcluster.lifecycle.transitions import (
    LEASE,
    Result,
    end,
    of,
    set_task,
    start,
    stop,
    with_host,
)
from tfcluster.lifecycle.types import (
    Action,
    DropHosts,
    Failure,
    HostFailed,
    HostLost,
    HostState,
    Phase,
    Replanned,
    Resize,
    Role,
    Say,
    SetDeadline,
    State,
    TaskStatus,
)
from tfcluster.light_dataclasses import replace
from tfcluster.states import TaskState


def host_lost(event: HostLost, state: State) -> Result:
    """Give up the host's tasks; the run ends, or continues on the remaining hosts."""
    if state.hosts[event.host] is HostState.GONE:
        return state, []
    state = with_host(state, event.host, HostState.GONE)
    if is_idle(state, event.host):
        return state, [DropHosts((event.host,))]
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


def is_idle(state: State, host: str) -> bool:
    """Whether the host has no task, so that the run does not need it."""
    return host not in state.plan.tasks.values()


def host_failed(event: HostFailed, state: State) -> Result:
    """End the run, which needs the host, unless the host was only to be added."""
    state = with_host(state, event.host, HostState.GONE)
    if is_idle(state, event.host):
        return state, [DropHosts((event.host,))]
    failure = Failure(
        task=None,
        host=event.host,
        cause=event.cause,
        tail=event.tail,
        run_exit_code=event.exit_code,
    )
    return fail(state, failure)


def resize(event: Resize, state: State) -> Result:
    """Restart all training tasks and servers with a new plan, unless it is too late."""
    ready = state.phase is Phase.TRAINING and state.started and not state.success
    if not ready or state.pending:
        return state, []
    again = frozenset(state.tasks) - frozenset(of(state, Role.EVALUATOR))
    state = replace(
        state,
        phase=Phase.RESTARTING,
        restarting=again,
        resizing=True,
        signal="TERM",
        codes=frozenset(),
    )
    state, actions = stop(state, Role.TRAINING, Role.SERVER, among=again)
    return state, [Say(event.cause), *actions]


def replanned(event: Replanned, state: State) -> Result:
    """Start the new plan's tasks, each in its next attempt."""
    if state.phase is not Phase.REPLANNING:
        return state, []
    actions: list[Action] = []
    tasks = {}
    newest = max(status.attempt for status in state.tasks.values())
    for task in event.plan.tasks:
        old = state.tasks.get(task)
        stays = event.plan.roles[task] is Role.EVALUATOR
        # A new task may have been dropped before, and may have had more attempts then.
        before = newest if old is None else old.attempt
        new = TaskStatus(attempt=before + 1)
        tasks[task] = old if stays and old is not None else new
    left_out = [
        task
        for task, status in state.tasks.items()
        if task not in tasks and status.state is not TaskState.LOST
    ]
    for task in left_out:
        state, more = set_task(
            state,
            task,
            TaskState.STOPPED,
            cause="dropped: there are fewer workers now"
            if state.resizing
            else "dropped because a host was lost",
        )
        actions += more
    state = replace(
        state, plan=event.plan, tasks=tasks, phase=Phase.TRAINING, resizing=False
    )
    again = [task for task, s in tasks.items() if s.state is TaskState.PENDING]
    state, more = start(state, again)
    return state, [*actions, *more]
