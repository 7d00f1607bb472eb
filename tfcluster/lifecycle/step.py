"""``step``: what the run does next, given what just happened. Pure.

A run succeeds when all training tasks have succeeded; servers are then stopped, and the
evaluator gets a grace period. The first failure on any host is the verdict; later
failures are secondary. A shutdown always has the same order: training tasks and
evaluator, then servers, then agents. Each is stopped gently, and killed after the grace
period. Results are fetched when all tasks have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import singledispatch

from tfcluster.base.errors import ExitCode
from tfcluster.base.light_dataclasses import replace
from tfcluster.base.states import RunState, TaskState
from tfcluster.base.task_id import TaskId
from tfcluster.lifecycle.failures import (
    fail,
    host_failed,
    host_lost,
    is_idle,
    judge,
    lost_hosts,
    no_longer_counts,
    replanned,
    resize,
)
from tfcluster.lifecycle.shutdown import (
    EVALUATOR_GRACE_S,
    close_expired,
    evaluator_expired,
    excuse,
    fetch,
    kill,
    leave,
    leave_results,
    outcome,
    start_expired,
    stop_expired,
    stop_gently,
    stopped_elsewhere,
    too_late,
)
from tfcluster.lifecycle.transitions import (
    BACKOFF,
    CLOSE,
    EVALUATOR,
    LEASE,
    RESTART,
    START,
    STOP,
    VERDICT,
    Result,
    alive,
    any_alive,
    close,
    end,
    of,
    set_task,
    start,
    stop,
    up,
    with_host,
    with_task,
)
from tfcluster.lifecycle.types import (
    Action,
    AgentAskedToStop,
    ClearDeadline,
    Event,
    Expired,
    Failure,
    Finish,
    HostAdded,
    HostClosed,
    HostFailed,
    HostLost,
    HostReady,
    HostState,
    Interrupted,
    LauncherFault,
    Phase,
    Plan,
    Replan,
    Replanned,
    Resize,
    ResultsFetched,
    Role,
    Say,
    SetDeadline,
    SetRunState,
    Stage,
    Stalled,
    State,
    TaskExited,
    TaskListening,
    TaskSettled,
    TaskStarted,
    TaskStatus,
    TaskUnstartable,
)

NOTHING_EXCHANGED = (
    "it exited without exchanging anything with the other tasks, so the training was "
    "not distributed: every task did all the work. If that is intended, set 'runtime: "
    "{strategy: none}'; for a script that trains nothing (evaluation, prediction), "
    "'runtime: {require_exchange: false}'"
)
"""Why a task with exit code 0 counts as failed."""


def begin(plan: Plan, earlier: Sequence[float] = ()) -> Result:
    """The state before anything has happened, and the first actions.

    ``earlier``: how many seconds ago each restart happened that the job has had in
    previous runs and that still counts.
    """
    hosts = dict.fromkeys(plan.tasks.values(), HostState.STARTING)
    tasks = dict.fromkeys(plan.tasks, TaskStatus())
    state = State(plan=plan, hosts=hosts, tasks=tasks, counted=len(earlier))
    actions: list[Action] = [
        SetRunState(RunState.STARTING),
        SetDeadline(START, plan.start_timeout_s),
    ]
    if plan.restart_within_s is not None:
        actions += [
            SetDeadline(f"{RESTART}before {number}", plan.restart_within_s - ago_s)
            for number, ago_s in enumerate(earlier)
        ]
    return state, actions


def step(state: State, event: Event) -> Result:
    """The state after ``event``, and the actions to perform, in order."""
    if state.phase is Phase.OVER:
        return state, []
    after, actions = _on(event, state)
    after, more = _advance(after)
    return after, [*actions, *more]


@singledispatch
def _on(event: object, state: State) -> Result:
    raise TypeError(f"not an event: {event!r}")


# --- hosts --------------------------------------------------------------------------


@_on.register
def _(event: HostReady, state: State) -> Result:
    state = with_host(state, event.host, HostState.READY)
    ready = all(host is HostState.READY for host in state.hosts.values())
    if state.phase is not Phase.GATHERING or not ready:
        return state, []
    state = replace(state, phase=Phase.TRAINING)
    return start(state, state.tasks)


@_on.register
def _(event: HostFailed, state: State) -> Result:
    return host_failed(event, state)


@_on.register
def _(event: HostAdded, state: State) -> Result:
    return with_host(state, event.host, HostState.STARTING), []


@_on.register
def _(event: Resize, state: State) -> Result:
    return resize(event, state)


@_on.register
def _(event: HostLost, state: State) -> Result:
    return host_lost(event, state)


@_on.register
def _(event: Replanned, state: State) -> Result:
    return replanned(event, state)


@_on.register
def _(event: AgentAskedToStop, state: State) -> Result:
    return stopped_elsewhere(state)


@_on.register
def _(event: HostClosed, state: State) -> Result:
    state = with_host(state, event.host, HostState.GONE)
    if state.phase is not Phase.ENDING and is_idle(state, event.host):
        return state, []
    return stopped_elsewhere(state)


# --- tasks --------------------------------------------------------------------------


@_on.register
def _(event: TaskStarted, state: State) -> Result:
    status = state.tasks[event.task]
    if status.attempt != event.attempt or status.state is not TaskState.STARTING:
        return state, []
    return set_task(state, event.task, TaskState.RUNNING)


@_on.register
def _(event: TaskListening, state: State) -> Result:
    status = state.tasks[event.task]
    if status.attempt != event.attempt:
        return state, []
    return with_task(state, event.task, replace(status, listening=True)), []


@_on.register
def _(event: TaskSettled, state: State) -> Result:
    status = state.tasks[event.task]
    if status.attempt != event.attempt:
        return state, []
    return with_task(state, event.task, replace(status, settled=True)), []


@_on.register
def _(event: TaskUnstartable, state: State) -> Result:
    status = state.tasks[event.task]
    if status.attempt != event.attempt or status.state.final:
        return state, []
    host = state.plan.tasks[event.task]
    if state.interrupted is not None and state.verdict is None:
        # What would have started it may have been told to end, too.
        return set_task(state, event.task, TaskState.STOPPED, cause=event.cause)
    state, actions = set_task(state, event.task, TaskState.FAILED, cause=event.cause)
    failure = Failure(
        task=event.task,
        host=host,
        cause=event.cause,
        run_exit_code=ExitCode.START,
    )
    state, more = fail(state, failure)
    return state, [*actions, *more]


@_on.register
def _(event: TaskExited, state: State) -> Result:
    status = state.tasks[event.task]
    if status.attempt != event.attempt or not alive(status):
        return state, []
    role = state.plan.roles[event.task]
    if event.exchanged:
        state = replace(state, exchanged=state.exchanged | {event.task})
    in_vain = event.code == 0 and event.task in state.plan.must_exchange
    in_vain = in_vain and event.task not in state.exchanged and not event.stopped
    good = event.code == 0 and (role is not Role.SERVER or event.stopped)
    good = good and not in_vain
    told = state.interrupted is not None and (
        event.signal == "SIGTERM" or (event.victim and state.verdict is None)
    )
    if event.stopped or told or (good and event.task in state.restarting):
        word = TaskState.STOPPED
    else:
        word = TaskState.SUCCEEDED if good else TaskState.FAILED
    if event.stopped and event.signal == "SIGKILL" and not state.killing:
        state = replace(state, killed=state.killed | {event.task})
    cause = event.cause
    if role is Role.SERVER and event.code == 0 and not event.stopped:
        cause = "exited before training ended"
    elif in_vain:
        cause = NOTHING_EXCHANGED
    state, actions = set_task(
        state,
        event.task,
        word,
        exit_code=event.code,
        signal=event.signal,
        cause=None if word is TaskState.SUCCEEDED else cause,
    )
    if word is not TaskState.FAILED:
        return state, actions
    failure = Failure(
        task=event.task,
        host=state.plan.tasks[event.task],
        cause=cause or f"exited with code {event.code}",
        exit_code=event.code,
        signal=event.signal,
        tail=event.tail,
        secondary=event.victim,
        at_s=event.at_s,
        again=not in_vain,
    )
    if role is Role.EVALUATOR:
        text = f"warning: {event.task} failed ({failure.cause}); training continues"
        return state, [*actions, replace(failure, secondary=True), Say(text)]
    if not event.victim:
        state = replace(state, codes=state.codes | {event.code})
    state, more = fail(state, failure)
    return state, [*actions, *more]


# --- ends ---------------------------------------------------------------------------


@_on.register
def _(event: ResultsFetched, state: State) -> Result:
    return replace(state, fetching=False), []


@_on.register
def _(event: Interrupted, state: State) -> Result:
    if state.fetching:
        return leave_results(state)
    state, actions = excuse(state)
    heard = state.interrupted is not None and state.interrupts == 0
    state = replace(state, interrupts=state.interrupts + 1)
    if heard:
        return state, actions  # a host has already reported the same request
    if state.verdict is None and state.interrupted is None:
        state = replace(state, interrupted=event.exit_code)
    if state.phase is not Phase.ENDING:
        state, more = stop_gently(state, event.exit_code)
    elif not state.killing:
        state, more = kill(state)
    else:
        state, more = leave(state)
    return state, [*actions, *more]


@_on.register
def _(event: Stalled, state: State) -> Result:
    failure = Failure(
        task=None,
        host=None,
        cause=event.cause,
        tail=event.tail,
        run_exit_code=ExitCode.NO_PROGRESS,
    )
    return fail(state, failure)


@_on.register
def _(event: LauncherFault, state: State) -> Result:
    failure = Failure(
        task=None, host=None, cause=event.cause, run_exit_code=event.exit_code
    )
    return fail(state, failure)


@_on.register
def _(event: Expired, state: State) -> Result:
    if event.deadline.startswith(LEASE):
        host = event.deadline.removeprefix(LEASE)
        return replace(state, awaiting=state.awaiting - {host}), []
    if event.deadline.startswith(RESTART):
        return no_longer_counts(state)
    if event.deadline == BACKOFF:
        return replace(state, backing_off=False), []
    expired: dict[str, Callable[[State], Result]] = {
        START: start_expired,
        VERDICT: judge,
        EVALUATOR: evaluator_expired,
        STOP: stop_expired,
        CLOSE: close_expired,
    }
    return expired[event.deadline](state)


# --- moving on ----------------------------------------------------------------------


def _advance(state: State) -> Result:
    """Take every transition that has become due, until none is left."""
    actions: list[Action] = []
    while True:
        state, more = _due(state)
        if not more:
            return state, actions
        actions += more


def _due(state: State) -> Result:
    if state.phase is Phase.TRAINING:
        return _due_in_training(state)
    if state.phase is Phase.RESTARTING:
        ended = all(_is_over(state, task) for task in state.restarting)
        if state.backing_off or not ended:
            return state, []
        lost = lost_hosts(state)
        if lost & state.awaiting:
            return state, []
        if lost or state.resizing:
            state = replace(state, phase=Phase.REPLANNING, restarting=frozenset())
            left = [h for h, s in state.hosts.items() if s is HostState.READY]
            return state, [Replan(frozenset(left))]
        again = [task for task in state.tasks if task in state.restarting]
        tasks = dict(state.tasks)
        for task in again:
            tasks[task] = TaskStatus(attempt=tasks[task].attempt + 1)
        state = replace(
            state, tasks=tasks, phase=Phase.TRAINING, restarting=frozenset()
        )
        return start(state, again)
    if state.phase is Phase.ENDING:
        return _due_in_ending(state)
    return state, []


def _is_over(state: State, task: TaskId) -> bool:
    """Whether the task has ended and left no process that could disturb the next
    attempt."""
    status = state.tasks[task]
    gone = state.hosts[state.plan.tasks[task]] is HostState.GONE
    return status.state.final and (status.settled or gone)


def _due_in_training(state: State) -> Result:
    if not state.started and all(up(state, t, s) for t, s in state.tasks.items()):
        state = replace(state, started=True)
        return state, [ClearDeadline(START), SetRunState(RunState.RUNNING)]
    training = of(state, Role.TRAINING)
    if state.pending or any(
        state.tasks[task].state is not TaskState.SUCCEEDED for task in training
    ):
        return state, []
    if not any_alive(state, Role.EVALUATOR):
        state = replace(state, success=True)
        return end(state, reason=None)
    if state.success:
        return state, []
    # Only the evaluator still runs; it needs no servers.
    state = replace(state, success=True)
    return stop(state, Role.SERVER, mark=SetDeadline(EVALUATOR, EVALUATOR_GRACE_S))


def _due_in_ending(state: State) -> Result:
    if state.stage is Stage.TASKS:
        if any_alive(state, Role.TRAINING, Role.EVALUATOR):
            return state, []
        state = replace(state, stage=Stage.SERVERS)
        told = too_late(state)
        state, more = stop(state, Role.SERVER, mark=ClearDeadline(EVALUATOR))
        return state, [*told, *more]
    if state.stage is Stage.SERVERS:
        if any_alive(state, Role.SERVER):
            return state, []
        state = replace(state, stage=Stage.RESULTS)
        actions: list[Action] = [ClearDeadline(START), ClearDeadline(STOP)]
        state, fetching = fetch(state)
        for task, status in state.tasks.items():
            if status.state is TaskState.PENDING:
                state, more = set_task(state, task, TaskState.STOPPED)
                actions += more
        return state, [*actions, *fetching]
    if state.stage is Stage.RESULTS:
        if state.fetching:
            return state, []
        state = replace(state, stage=Stage.HOSTS)
        return state, [ClearDeadline(STOP), *close(state, state.plan.grace_s)]
    if any(host is not HostState.GONE for host in state.hosts.values()):
        return state, []
    code, word = outcome(state)
    state = replace(state, phase=Phase.OVER)
    return state, [ClearDeadline(CLOSE), SetRunState(word), Finish(word, code)]
