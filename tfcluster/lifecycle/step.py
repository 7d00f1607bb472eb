"""``step``: what the run does next, given what just happened. Pure.

A run succeeds when all training tasks have succeeded; servers are then stopped, and the
evaluator gets a grace period. The first failure on any host is the verdict; later
failures are secondary. A shutdown always has the same order: training tasks and
evaluator, then servers, then agents. Each is stopped gently, and killed after the grace
period. Results are fetched when all tasks have ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfcluster.base.errors import ExitCode
from tfcluster.base.light_dataclasses import replace
from tfcluster.base.states import RunState, TaskState
from tfcluster.base.task_id import TaskId
from tfcluster.lifecycle import actions, events
from tfcluster.lifecycle.failures import (
    fail,
    host_failed,
    host_lost,
    is_idle,
    lost_hosts,
    reach_verdict,
    replanned,
    resize,
)
from tfcluster.lifecycle.shutdown import (
    EVALUATOR_GRACE_S,
    close_expired,
    evaluator_expired,
    fetch,
    interrupt,
    outcome,
    say_too_late,
    start_expired,
    stop_expired,
    stopped_elsewhere,
)
from tfcluster.lifecycle.state import (
    BACKOFF,
    CLOSE,
    EVALUATOR,
    LEASE,
    RESTART,
    START,
    STOP,
    VERDICT,
    HostState,
    Phase,
    Plan,
    Role,
    Stage,
    State,
    TaskStatus,
    Turn,
    alive,
    any_alive,
    is_up,
    of,
    remaining_hosts,
)

NOTHING_EXCHANGED = (
    "it exited without exchanging anything with the other tasks, so the training was "
    "not distributed: every task did all the work. If that is intended, set 'runtime: "
    "{strategy: none}'; for a script that trains nothing (evaluation, prediction), "
    "'runtime: {require_exchange: false}'"
)
"""Why a task with exit code 0 counts as failed."""

Result = tuple[State, list[actions.Action]]


def begin(plan: Plan, earlier: Sequence[float] = ()) -> Result:
    """The first state and actions; ``earlier``: ages in s of counted restarts."""
    hosts = dict.fromkeys(plan.tasks.values(), HostState.STARTING)
    tasks = dict.fromkeys(plan.tasks, TaskStatus())
    state = State(plan=plan, hosts=hosts, tasks=tasks, counted=len(earlier))
    first: list[actions.Action] = [
        actions.SetRunState(RunState.STARTING),
        actions.SetDeadline(START, plan.start_timeout_s),
    ]
    if plan.restart_within_s is not None:
        first += [
            actions.SetDeadline(
                f"{RESTART}before {number}", plan.restart_within_s - ago_s
            )
            for number, ago_s in enumerate(earlier)
        ]
    return state, first


def step(state: State, event: events.Event) -> Result:
    if state.phase is Phase.OVER:
        return state, []
    turn = Turn(state)
    _handle(turn, event)
    _advance(turn)
    return turn.state, turn.actions


def _handle(turn: Turn, event: events.Event) -> None:
    state = turn.state
    match event:
        case events.HostReady(host):
            state.hosts[host] = HostState.READY
            ready = all(word is HostState.READY for word in state.hosts.values())
            if state.phase is Phase.GATHERING and ready:
                state.phase = Phase.TRAINING
                turn.start(state.tasks)
        case events.HostAdded(host):
            state.hosts[host] = HostState.STARTING
        case events.HostFailed():
            host_failed(turn, event)
        case events.HostLost():
            host_lost(turn, event)
        case events.HostClosed(host):
            state.hosts[host] = HostState.GONE
            if state.phase is Phase.ENDING or not is_idle(state, host):
                stopped_elsewhere(turn)
        case events.AgentAskedToStop():
            stopped_elsewhere(turn)
        case events.Resize(cause):
            resize(turn, cause)
        case events.Replanned(plan):
            replanned(turn, plan)
        case events.ResultsFetched():
            state.fetching = False
        case events.Interrupted(exit_code):
            interrupt(turn, exit_code)
        case events.Stalled(cause, tail):
            code = ExitCode.NO_PROGRESS
            fail(turn, actions.Failure(cause=cause, tail=tail, run_exit_code=code))
        case events.LauncherFault(cause, exit_code):
            fail(turn, actions.Failure(cause=cause, run_exit_code=exit_code))
        case events.Expired(deadline):
            _expire(turn, deadline)
        case _:
            status = state.tasks[event.task]
            if status.attempt == event.attempt:
                _handle_task(turn, event, status)


def _handle_task(turn: Turn, event: events.TaskEvent, status: TaskStatus) -> None:
    tasks, task = turn.state.tasks, event.task
    match event:
        case events.TaskStarted():
            if status.state is TaskState.STARTING:
                turn.set_task(task, TaskState.RUNNING)
        case events.TaskListening():
            tasks[task] = replace(status, listening=True)
        case events.TaskSettled():
            tasks[task] = replace(status, settled=True)
        case events.TaskUnstartable(cause=cause):
            if not status.state.final:
                _unstartable(turn, task, cause)
        case events.TaskExited():
            if alive(status):
                _exited(turn, event)


def _unstartable(turn: Turn, task: TaskId, cause: str) -> None:
    state = turn.state
    if state.interrupted is not None and state.verdict is None:
        # What would have started it may have been told to end, too.
        turn.set_task(task, TaskState.STOPPED, cause=cause)
        return
    turn.set_task(task, TaskState.FAILED, cause=cause)
    host, code = state.plan.tasks[task], ExitCode.START
    fail(turn, actions.Failure(task=task, host=host, cause=cause, run_exit_code=code))


def _exited(turn: Turn, event: events.TaskExited) -> None:
    state, task = turn.state, event.task
    if event.exchanged:
        state.exchanged |= {task}
    cause, good = event.cause, event.code == 0
    in_vain = False
    if good and not event.stopped:
        in_vain = task in state.plan.must_exchange and task not in state.exchanged
        if in_vain:
            cause, good = NOTHING_EXCHANGED, False
        elif state.plan.roles[task] is Role.SERVER:
            cause, good = "exited before training ended", False
    told = state.interrupted is not None and (
        event.signal == "SIGTERM" or (event.victim and state.verdict is None)
    )
    if event.stopped or told or (good and task in state.restarting):
        word = TaskState.STOPPED
    else:
        word = TaskState.SUCCEEDED if good else TaskState.FAILED
    if event.stopped and event.signal == "SIGKILL" and not state.killing:
        state.killed |= {task}
    turn.set_task(
        task,
        word,
        exit_code=event.code,
        signal=event.signal,
        cause=None if word is TaskState.SUCCEEDED else cause,
    )
    if word is TaskState.FAILED:
        _failed(turn, event, cause or f"exited with code {event.code}", not in_vain)


def _failed(turn: Turn, event: events.TaskExited, cause: str, again: bool) -> None:
    """A task has failed; ``again``: a restart might help."""
    state = turn.state
    failure = actions.Failure(
        task=event.task,
        host=state.plan.tasks[event.task],
        cause=cause,
        exit_code=event.code,
        signal=event.signal,
        tail=event.tail,
        secondary=event.victim,
        at_s=event.at_s,
        again=again,
    )
    if state.plan.roles[event.task] is Role.EVALUATOR:
        text = f"warning: {event.task} failed ({cause}); training continues"
        turn.act(replace(failure, secondary=True), actions.Say(text))
        return
    if not event.victim:
        state.codes |= {event.code}
    fail(turn, failure)


def _expire(turn: Turn, deadline: str) -> None:
    state = turn.state
    if deadline.startswith(LEASE):
        state.awaiting -= {deadline.removeprefix(LEASE)}
    elif deadline.startswith(RESTART):
        state.counted -= 1
    elif deadline == BACKOFF:
        state.backing_off = False
    else:
        expired = {
            START: start_expired,
            VERDICT: reach_verdict,
            EVALUATOR: evaluator_expired,
            STOP: stop_expired,
            CLOSE: close_expired,
        }
        expired[deadline](turn)


def _advance(turn: Turn) -> None:
    """Take every transition that has become due, until none is left."""
    due = {
        Phase.TRAINING: _advance_training,
        Phase.RESTARTING: _advance_restart,
        Phase.ENDING: _advance_end,
    }
    count = -1
    while len(turn.actions) != count and turn.state.phase in due:
        count = len(turn.actions)
        due[turn.state.phase](turn)


def _advance_training(turn: Turn) -> None:
    state = turn.state
    if not state.started and all(is_up(state, task) for task in state.tasks):
        state.started = True
        turn.act(actions.ClearDeadline(START), actions.SetRunState(RunState.RUNNING))
    training = of(state, Role.TRAINING)
    if state.pending or any(
        state.tasks[task].state is not TaskState.SUCCEEDED for task in training
    ):
        return
    if not any_alive(state, Role.EVALUATOR):
        state.success = True
        turn.end(reason=None)
    elif not state.success:
        # Only the evaluator still runs; it needs no servers.
        state.success = True
        turn.act(actions.SetDeadline(EVALUATOR, EVALUATOR_GRACE_S))
        turn.stop(Role.SERVER)


def _advance_restart(turn: Turn) -> None:
    state = turn.state
    ended = all(_is_over(state, task) for task in state.restarting)
    lost = lost_hosts(state)
    if state.backing_off or not ended or lost & state.awaiting:
        return
    if lost or state.resizing:
        state.phase, state.restarting = Phase.REPLANNING, frozenset()
        left = [h for h, word in state.hosts.items() if word is HostState.READY]
        turn.act(actions.Replan(frozenset(left)))
        return
    again = [task for task in state.tasks if task in state.restarting]
    for task in again:
        state.tasks[task] = TaskStatus(attempt=state.tasks[task].attempt + 1)
    state.phase, state.restarting = Phase.TRAINING, frozenset()
    turn.start(again)


def _is_over(state: State, task: TaskId) -> bool:
    """Whether it has ended, and left no process that disturbs the next attempt."""
    status = state.tasks[task]
    gone = state.hosts[state.plan.tasks[task]] is HostState.GONE
    return status.state.final and (status.settled or gone)


def _advance_end(turn: Turn) -> None:
    state = turn.state
    match state.stage:
        case Stage.TASKS:
            if not any_alive(state, Role.TRAINING, Role.EVALUATOR):
                state.stage = Stage.SERVERS
                say_too_late(turn)
                turn.act(actions.ClearDeadline(EVALUATOR))
                turn.stop(Role.SERVER)
        case Stage.SERVERS:
            if not any_alive(state, Role.SERVER):
                state.stage = Stage.RESULTS
                turn.act(actions.ClearDeadline(START), actions.ClearDeadline(STOP))
                fetch(turn)
                for task, status in state.tasks.items():
                    if status.state is TaskState.PENDING:
                        turn.set_task(task, TaskState.STOPPED)
        case Stage.RESULTS:
            if not state.fetching:
                state.stage = Stage.HOSTS
                turn.act(actions.ClearDeadline(STOP))
                turn.close(state.plan.grace_s)
        case Stage.HOSTS:
            if not remaining_hosts(state):
                code, word = outcome(state)
                state.phase = Phase.OVER
                turn.act(
                    actions.ClearDeadline(CLOSE),
                    actions.SetRunState(word),
                    actions.Finish(word, code),
                )
