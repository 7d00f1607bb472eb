"""Finds the cause among failures and lost hosts; decides what follows. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from tfcluster.base.durations import duration_text
from tfcluster.base.errors import ExitCode
from tfcluster.base.light_dataclasses import replace
from tfcluster.base.states import TaskState
from tfcluster.lifecycle.transitions import (
    BACKOFF,
    LEASE,
    RESTART,
    VERDICT,
    Result,
    alive,
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
    Plan,
    Replanned,
    Resize,
    Role,
    Say,
    SetDeadline,
    State,
    TaskStatus,
)

LONGEST_BACKOFF_S = 300.0
VERDICT_WINDOW_S = 0.4
"""Failures this close together count as one event with one cause."""


def fail(state: State, failure: Failure) -> Result:
    """Note a failure; ``judge`` acts on the first failures after VERDICT_WINDOW_S."""
    over = state.success or state.phase in (
        Phase.ENDING,
        Phase.RESTARTING,
        Phase.REPLANNING,
    )
    if over or state.verdict is not None:
        return state, [replace(failure, secondary=True)]
    first = not state.pending
    state = replace(state, pending=(*state.pending, failure))
    return state, [SetDeadline(VERDICT, VERDICT_WINDOW_S)] if first else []


def judge(state: State) -> Result:
    """Find the cause among the failures that arrived together, and act on it."""
    if not state.pending:
        return state, []
    cause, *others = sorted(state.pending, key=_blame)
    cause = replace(cause, secondary=False)
    later = [replace(other, secondary=True) for other in others]
    state = replace(state, pending=())
    if _may_restart(state, (cause, *others)):
        return restart(state, cause)
    if _can_be_spared(state, (cause, *others)):
        named = ", ".join(str(failure.task) for failure in (cause, *others))
        them = "them" if others else "it"
        text = f"warning: {named} failed ({cause.cause}); continuing without {them}"
        spared = [replace(each, secondary=True) for each in (cause, *others)]
        return replace(state, codes=frozenset()), [*spared, Say(text)]
    actions: list[Action] = [cause, *later]
    if state.plan.max_restarts and cause.task is not None:
        actions.append(Say(_giving_up(state)))
    state = replace(state, verdict=cause)
    state, more = end(state, reason=None)
    return state, [*actions, *more]


def _blame(failure: Failure) -> tuple[bool, bool, float]:
    """Sort key: failures that cannot be the consequence of another come first.

    A lost host explains the end of its tasks; a task killed by a signal did not fail
    because of a peer; a victim's own output says that a peer was gone. The rest are
    sorted by the time when a task ended, not when it was reported: an agent waits for a
    task's remaining output before it reports.
    """
    by_itself = failure.task is not None and failure.signal is None
    return failure.secondary, by_itself, failure.at_s


def _may_restart(state: State, failures: Iterable[Failure]) -> bool:
    return (
        state.counted < state.plan.max_restarts
        and state.phase is Phase.TRAINING
        and all(map(_can_be_got_over, failures))
        and (not lost_hosts(state) or enough_are_left(state))
    )


def _can_be_spared(state: State, failures: Iterable[Failure]) -> bool:
    """Whether other live tasks can do the work of the failed tasks."""
    return (
        state.phase is Phase.TRAINING
        and all(failure.task in state.plan.spare for failure in failures)
        and any(alive(state.tasks[task]) for task in state.plan.apart)
    )


def _can_be_got_over(failure: Failure) -> bool:
    if failure.task is not None:
        return failure.again and failure.run_exit_code is ExitCode.TASK_FAILED
    return failure.run_exit_code is ExitCode.CONTACT_LOST


def lost_hosts(state: State) -> frozenset[str]:
    """The hosts that are gone and have tasks of the current plan."""
    used = set(state.plan.tasks.values())
    return frozenset(h for h in used if state.hosts[h] is HostState.GONE)


def enough_are_left(state: State) -> bool:
    """Whether training can continue without the lost hosts."""
    least, lost = state.plan.min_training, lost_hosts(state)
    if least is None:
        return False
    roles = [
        (state.plan.roles[task], host in lost)
        for task, host in state.plan.tasks.items()
    ]
    left = sum(role is Role.TRAINING and not gone for role, gone in roles)
    return left >= least and all(role is Role.TRAINING for role, gone in roles if gone)


def restart(state: State, cause: Failure) -> Result:
    """Stop the tasks to restart; they start again once all of them have ended."""
    failed = frozenset(
        task for task, s in state.tasks.items() if s.state is TaskState.FAILED
    )
    alone = state.plan.restart_alone and not failed & state.plan.keepers
    by_itself = alone or failed <= state.plan.apart
    alone = by_itself and not lost_hosts(state)
    again = (
        failed
        if alone
        else frozenset(state.tasks) - frozenset(of(state, Role.EVALUATOR))
    )
    plan, number = state.plan, state.restarts + 1
    wait_s = _backoff_s(plan, state.counted)
    state = replace(
        state,
        phase=Phase.RESTARTING,
        restarting=again,
        restarts=number,
        counted=state.counted + 1,
        backing_off=wait_s > 0,
        signal="TERM",
        codes=frozenset(),
    )
    deadlines: list[Action] = []
    if wait_s > 0:
        deadlines.append(SetDeadline(BACKOFF, wait_s))
    if plan.restart_within_s is not None:
        deadlines.append(SetDeadline(f"{RESTART}{number}", plan.restart_within_s))
    what = "it" if alone else "all tasks"
    if lost_hosts(state):
        what = "the training on the remaining hosts"
    if wait_s > 0:
        what += f" in {duration_text(wait_s)}"
    text = f"{_what_happened(cause)}; restarting {what} ({_which(state)})"
    state, actions = stop(state, Role.TRAINING, Role.SERVER, among=again)
    return state, [Say(text), *deadlines, *actions]


def _backoff_s(plan: Plan, before: int) -> float:
    """How long a restart waits after ``before`` earlier restarts."""
    wait_s = min(plan.backoff_s, LONGEST_BACKOFF_S)
    for _ in range(before):
        if not 0.0 < wait_s < LONGEST_BACKOFF_S:
            break  # so that no number of restarts overflows it
        wait_s = min(2 * wait_s, LONGEST_BACKOFF_S)
    return wait_s


def no_longer_counts(state: State) -> Result:
    """Stop counting an old restart towards the maximum."""
    return replace(state, counted=state.counted - 1), []


def _which(state: State) -> str:
    """The number of the restart that has just been counted, in words."""
    text = f"restart {state.counted} of {state.plan.max_restarts}"
    within_s = state.plan.restart_within_s
    return text if within_s is None else f"{text} within {duration_text(within_s)}"


def _giving_up(state: State) -> str:
    count = f"{state.counted} restart{'' if state.counted == 1 else 's'}"
    within_s = state.plan.restart_within_s
    within = "" if within_s is None else f" within {duration_text(within_s)}"
    return f"giving up after {count}{within}"


def _what_happened(cause: Failure) -> str:
    if cause.task is not None:
        return f"{cause.task} on {cause.host} failed: {cause.cause}"
    named = cause.host is None or cause.cause.startswith(cause.host)
    return cause.cause if named else f"{cause.host}: {cause.cause}"


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
