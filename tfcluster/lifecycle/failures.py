"""Finds the cause among failures and lost hosts; decides what follows. Pure."""

from __future__ import annotations

from tfcluster.base.durations import duration_text
from tfcluster.base.errors import ExitCode
from tfcluster.base.light_dataclasses import replace
from tfcluster.base.states import TaskState
from tfcluster.base.task_id import TaskId
from tfcluster.lifecycle import actions, events
from tfcluster.lifecycle.state import (
    BACKOFF,
    LEASE,
    RESTART,
    VERDICT,
    HostState,
    Phase,
    Plan,
    Role,
    State,
    TaskStatus,
    Turn,
    alive,
    of,
)

LONGEST_BACKOFF_S = 300.0
VERDICT_WINDOW_S = 0.4
"""Failures this close together count as one event with one cause."""


def fail(turn: Turn, failure: actions.Failure) -> None:
    """Note a failure; ``reach_verdict`` acts on it after VERDICT_WINDOW_S."""
    state = turn.state
    over = state.success or state.phase in (
        Phase.ENDING,
        Phase.RESTARTING,
        Phase.REPLANNING,
    )
    if over or state.verdict is not None:
        turn.act(replace(failure, secondary=True))
        return
    if not state.pending:
        turn.act(actions.SetDeadline(VERDICT, VERDICT_WINDOW_S))
    state.pending = (*state.pending, failure)


def reach_verdict(turn: Turn) -> None:
    """Find the cause among the failures that arrived together, and act on it."""
    state = turn.state
    if not state.pending:
        return
    failures = sorted(state.pending, key=_order_of_blame)
    state.pending = ()
    cause = replace(failures[0], secondary=False)
    if (
        state.counted < state.plan.max_restarts
        and state.phase is Phase.TRAINING
        and all(map(_can_be_got_over, failures))
        and (not lost_hosts(state) or _enough_are_left(state))
    ):
        _restart(turn, cause)
        return
    # Other live tasks can do the work of the failed tasks.
    is_spared = (
        state.phase is Phase.TRAINING
        and all(failure.task in state.plan.spare for failure in failures)
        and any(alive(state.tasks[task]) for task in state.plan.apart)
    )
    if is_spared:
        names = ", ".join(str(failure.task) for failure in failures)
        them = "them" if failures[1:] else "it"
        text = f"warning: {names} failed ({cause.cause}); continuing without {them}"
        state.codes = frozenset()
        turn.act(
            *(replace(failure, secondary=True) for failure in failures),
            actions.Say(text),
        )
        return
    turn.act(cause, *(replace(failure, secondary=True) for failure in failures[1:]))
    if state.plan.max_restarts and cause.task is not None:
        count = f"{state.counted} restart{'' if state.counted == 1 else 's'}"
        turn.say(f"giving up after {count}{_within(state.plan)}")
    state.verdict = cause
    turn.end(reason=None)


def _order_of_blame(failure: actions.Failure) -> tuple[bool, bool, float]:
    """Sort key: failures that cannot be the consequence of another come first.

    A lost host explains the end of its tasks; a task killed by a signal did not fail
    because of a peer; a victim's own output says that a peer was gone. The rest are
    sorted by the time when a task ended, not when it was reported: an agent waits for a
    task's remaining output before it reports.
    """
    by_itself = failure.task is not None and failure.signal is None
    return failure.secondary, by_itself, failure.at_s


def _can_be_got_over(failure: actions.Failure) -> bool:
    if failure.task is not None:
        return failure.again and failure.run_exit_code is ExitCode.TASK_FAILED
    return failure.run_exit_code is ExitCode.CONTACT_LOST


def lost_hosts(state: State) -> frozenset[str]:
    used = set(state.plan.tasks.values())
    return frozenset(h for h in used if state.hosts[h] is HostState.GONE)


def _enough_are_left(state: State) -> bool:
    least, lost = state.plan.min_training, lost_hosts(state)
    if least is None:
        return False
    roles = [
        (state.plan.roles[task], host in lost)
        for task, host in state.plan.tasks.items()
    ]
    left = sum(role is Role.TRAINING and not gone for role, gone in roles)
    return left >= least and all(role is Role.TRAINING for role, gone in roles if gone)


def _restart(turn: Turn, cause: actions.Failure) -> None:
    """Stop the tasks to restart; they start again once all of them have ended."""
    state, plan = turn.state, turn.state.plan
    failed = frozenset(
        task for task, s in state.tasks.items() if s.state is TaskState.FAILED
    )
    lost = lost_hosts(state)
    by_itself = plan.restart_alone and not failed & plan.keepers
    alone = (by_itself or failed <= plan.apart) and not lost
    wait_s = _backoff_s(plan, state.counted)
    state.restarts += 1
    state.counted += 1
    state.backing_off = wait_s > 0
    what = "the training on the remaining hosts" if lost else "all tasks"
    when = f" in {duration_text(wait_s)}" if wait_s > 0 else ""
    which = f"restart {state.counted} of {plan.max_restarts}{_within(plan)}"
    happened = _what_happened(cause)
    turn.act(
        actions.Say(f"{happened}; restarting {'it' if alone else what}{when} ({which})")
    )
    if wait_s > 0:
        turn.act(actions.SetDeadline(BACKOFF, wait_s))
    if plan.restart_within_s is not None:
        name = f"{RESTART}{state.restarts}"
        turn.act(actions.SetDeadline(name, plan.restart_within_s))
    _stop_to_restart(turn, failed if alone else _all_but_evaluators(state))


def _stop_to_restart(turn: Turn, tasks: frozenset[TaskId]) -> None:
    state = turn.state
    state.phase, state.restarting = Phase.RESTARTING, tasks
    state.signal, state.codes = "TERM", frozenset()
    turn.stop(Role.TRAINING, Role.SERVER, among=tasks)


def _all_but_evaluators(state: State) -> frozenset[TaskId]:
    return frozenset(state.tasks) - frozenset(of(state, Role.EVALUATOR))


def _backoff_s(plan: Plan, before: int) -> float:
    """How long a restart waits after ``before`` earlier restarts."""
    wait_s = min(plan.backoff_s, LONGEST_BACKOFF_S)
    for _ in range(before):
        if not 0.0 < wait_s < LONGEST_BACKOFF_S:
            break  # so that no number of restarts overflows it
        wait_s = min(2 * wait_s, LONGEST_BACKOFF_S)
    return wait_s


def _within(plan: Plan) -> str:
    within_s = plan.restart_within_s
    return "" if within_s is None else f" within {duration_text(within_s)}"


def _what_happened(cause: actions.Failure) -> str:
    if cause.task is not None:
        return f"{cause.task} on {cause.host} failed: {cause.cause}"
    named = cause.host is None or cause.cause.startswith(cause.host)
    return cause.cause if named else f"{cause.host}: {cause.cause}"


def host_lost(turn: Turn, event: events.HostLost) -> None:
    state, host = turn.state, event.host
    if state.hosts[host] is HostState.GONE:
        return
    state.hosts[host] = HostState.GONE
    if is_idle(state, host):
        turn.act(actions.DropHosts((host,)))
        return
    for task in [task for task, where in state.plan.tasks.items() if where == host]:
        word = state.tasks[task].state
        if word is TaskState.PENDING:
            turn.set_task(task, TaskState.STOPPED)
        elif not word.final:
            turn.set_task(task, TaskState.LOST, cause=event.cause)
    if event.harmless_after_s:
        state.awaiting |= {host}
        turn.act(actions.SetDeadline(f"{LEASE}{host}", event.harmless_after_s))
    code = ExitCode.CONTACT_LOST
    failure = actions.Failure(host=host, cause=event.cause, run_exit_code=code)
    turn.act(actions.DropHosts((host,)))
    again = state.phase in (Phase.RESTARTING, Phase.REPLANNING)
    if again and not _enough_are_left(state):
        state.verdict = failure
        turn.act(failure)
        turn.end(reason=None)
        return
    if state.phase is Phase.REPLANNING:
        state.phase = Phase.RESTARTING
    fail(turn, failure)


def is_idle(state: State, host: str) -> bool:
    return host not in state.plan.tasks.values()


def host_failed(turn: Turn, event: events.HostFailed) -> None:
    """End the run, which needs the host, unless the host was only to be added."""
    turn.state.hosts[event.host] = HostState.GONE
    if is_idle(turn.state, event.host):
        turn.act(actions.DropHosts((event.host,)))
        return
    failure = actions.Failure(
        host=event.host,
        cause=event.cause,
        tail=event.tail,
        run_exit_code=event.exit_code,
    )
    fail(turn, failure)


def resize(turn: Turn, cause: str) -> None:
    """Restart all training tasks and servers with a new plan, unless it is too late."""
    state = turn.state
    ready = state.phase is Phase.TRAINING and state.started and not state.success
    if ready and not state.pending:
        state.resizing = True
        turn.say(cause)
        _stop_to_restart(turn, _all_but_evaluators(state))


def replanned(turn: Turn, plan: Plan) -> None:
    """Start the new plan's tasks, each in its next attempt."""
    state = turn.state
    if state.phase is not Phase.REPLANNING:
        return
    newest = max(status.attempt for status in state.tasks.values())
    tasks = {}
    for task in plan.tasks:
        old = state.tasks.get(task)
        if old is not None and plan.roles[task] is Role.EVALUATOR:
            tasks[task] = old
        else:
            # A new task may have been dropped before, after more attempts.
            tasks[task] = TaskStatus(attempt=1 + (old.attempt if old else newest))
    why = "there are fewer workers now" if state.resizing else "a host was lost"
    cause = f"dropped: {why}"
    for task, status in state.tasks.items():
        if task not in tasks and status.state is not TaskState.LOST:
            turn.set_task(task, TaskState.STOPPED, cause=cause)
    state.plan, state.tasks = plan, tasks
    state.phase, state.resizing = Phase.TRAINING, False
    turn.start(t for t, status in tasks.items() if status.state is TaskState.PENDING)
