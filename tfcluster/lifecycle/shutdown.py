"""Shuts down a run that does not succeed by itself. Pure.

Either the user interrupts it, up to three times, or a deadline passes.
"""

from __future__ import annotations

from collections.abc import Collection

from tfcluster.base.errors import ExitCode
from tfcluster.base.light_dataclasses import replace
from tfcluster.base.states import RunState, TaskState
from tfcluster.lifecycle.failures import fail, judge
from tfcluster.lifecycle.transitions import (
    Result,
    alive,
    close,
    end,
    set_task,
    stop,
    up,
)
from tfcluster.lifecycle.types import (
    Action,
    DropHosts,
    Failure,
    FetchResults,
    Finish,
    HostState,
    LeaveResults,
    Phase,
    Role,
    Say,
    SetRunState,
    Stage,
    State,
    StopTasks,
)

_FIRST_OF_SIGNALS = 128
"""A shell's exit code of this or more means that a signal killed its command."""
_TAKEN = frozenset({*ExitCode, 99, 100, 126, 127})
"""Exit codes of tasks that are never passed on.

They are the launcher's own, or make schedulers and scripts requeue or give up. 99: Grid
Engine requeues the job; 100: Grid Engine puts the job into the error state; 126, 127: a
shell could not execute its command.
"""
_WORDS = {
    ExitCode.INTERRUPTED: "interrupted",
    ExitCode.HANGUP: "the terminal hung up",
    ExitCode.TIME_LIMIT: "the time limit is near",
}

_SIGNALS = {ExitCode.INTERRUPTED: "INT", ExitCode.TIME_LIMIT: "USR1"}
"""The signal for the tasks, unless it is TERM: the one that the launcher has got."""

_OF_SCHEDULER = (ExitCode.TERMINATED, ExitCode.TIME_LIMIT, ExitCode.PREEMPTED)

EVALUATOR_GRACE_S = 60.0
"""How long an evaluator may continue after training has succeeded."""


def stop_gently(state: State, code: ExitCode) -> Result:
    interactive = code is ExitCode.INTERRUPTED
    state = replace(state, signal=_SIGNALS.get(code, "TERM"))
    word = _WORDS.get(code, "stop requested")
    tip = " (press Ctrl-C again to kill them)" if interactive else ""
    state, actions = end(state, reason=word)
    grace = f"{state.plan.grace_s:g} s"
    text = f"{word}: stopping all tasks; they have {grace} to exit{tip}"
    return state, [Say(text), *actions]


def stopped_elsewhere(state: State) -> Result:
    """Handle an agent that ends, or was told to end, but not by this launcher.

    That happens when somebody cancels the steps of a Slurm job but not its script.
    """
    state, actions = excuse(state)
    if state.phase in (Phase.ENDING, Phase.OVER):
        return state, actions
    state = replace(state, interrupted=ExitCode.TERMINATED)
    state, more = stop_gently(state, ExitCode.TERMINATED)
    return state, [*actions, *more]


def excuse(state: State) -> Result:
    """Drop pending failures by SIGTERM, because the run was told to end.

    Schedulers signal agents, tasks and the launcher, and any of them may end first. So
    a task that has just died of SIGTERM counts as stopped, not as failed, and so do its
    peers that cannot go on without it, unless something else has failed as well.
    """
    stopped = [each for each in state.pending if each.signal == "SIGTERM"]
    rest = tuple(each for each in state.pending if each not in stopped)
    if all(each.secondary for each in rest):
        stopped, rest = [*state.pending], ()
    state = replace(state, pending=rest)
    actions: list[Action] = []
    for each in stopped:
        if each.task is not None and state.tasks[each.task].state is TaskState.FAILED:
            state, more = set_task(
                state, each.task, TaskState.STOPPED, signal=each.signal
            )
            actions += more
    state, more = judge(state)
    return state, [*actions, *more]


def kill(state: State) -> Result:
    state = replace(state, killing=True)
    actions: list[Action] = [Say("killing all tasks now")]
    left = tuple(task for task, status in state.tasks.items() if alive(status))
    if left:
        actions.append(StopTasks(left, "KILL", 0))
    if state.stage is Stage.HOSTS:
        actions += close(state, 0)
    return state, actions


def fetch(state: State) -> Result:
    """Fetch the files of the tasks, which have ended, before agents end; unless the end
    is urgent.

    A run in which no task was started has no results.
    """
    hosts = tuple(h for h, s in state.hosts.items() if s is HostState.READY)
    ran = any(status.state is not TaskState.PENDING for status in state.tasks.values())
    if not (state.plan.results and ran):
        return state, []
    if state.killing:
        return state, [FetchResults(hosts, "the run was told to end at once")]
    # At the limit itself, the scheduler sends another signal, which ends the fetch.
    in_time = state.plan.requeues and state.interrupted is ExitCode.TIME_LIMIT
    if state.plan.hurried and state.interrupted in _OF_SCHEDULER and not in_time:
        return state, [FetchResults(hosts, "the scheduler ends the job")]
    return replace(state, fetching=True), [FetchResults(hosts)]


def too_late(state: State) -> list[Action]:
    """Say that tasks did not end by themselves when they were told to."""
    if not state.killed or state.interrupted is None:
        return []
    names = sorted(str(task) for task in state.killed)
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return [
        Say(
            f"warning: killed after {state.plan.grace_s:g} s (grace): "
            f"{', '.join(names[:8])}{more}. What they had not saved by then is lost, "
            "and a file that they were writing may be incomplete"
        )
    ]


def leave_results(state: State) -> Result:
    """End the fetch: an interrupt came when only results were still missing."""
    return state, [
        Say("stopped fetching: results that are not here stay on the hosts"),
        LeaveResults("the fetch was interrupted"),
    ]


def leave(state: State) -> Result:
    """Exit at once, on the third interrupt, and say which tasks may still run."""
    left = [str(task) for task, status in state.tasks.items() if alive(status)]
    hosts = tuple(h for h, s in state.hosts.items() if s is not HostState.GONE)
    text = "exiting now"
    if left:
        text += f"; may still be running: {', '.join(left)}"
    state, lost = _give_up(state)
    code, word = outcome(state)
    state = replace(state, phase=Phase.OVER)
    ends: list[Action] = [DropHosts(hosts), SetRunState(word), Finish(word, code)]
    return state, [Say(text), *lost, *ends]


def _give_up(state: State) -> Result:
    """Give every task a final state; the fate of tasks that ran is unknown."""
    actions: list[Action] = []
    for task, status in state.tasks.items():
        if not status.state.final:
            word = TaskState.LOST if alive(status) else TaskState.STOPPED
            state, more = set_task(state, task, word)
            actions += more
    return state, actions


def start_expired(state: State) -> Result:
    if state.started or state.phase is Phase.ENDING:
        return state, []
    if state.phase is Phase.GATHERING:
        late = [h for h, s in state.hosts.items() if s is HostState.STARTING]
    else:
        late = [
            str(task)
            for task, status in state.tasks.items()
            if not up(state, task, status)
        ]
    more = f" and {len(late) - 8} more" if len(late) > 8 else ""
    failure = Failure(
        task=None,
        host=None,
        cause=f"not ready after start_timeout ({state.plan.start_timeout_s:g} s): "
        f"{', '.join(late[:8])}{more}",
        run_exit_code=ExitCode.START,
    )
    return fail(state, failure)


def evaluator_expired(state: State) -> Result:
    text = (
        f"the evaluator is still running {EVALUATOR_GRACE_S:g} s after training; "
        "stopping it"
    )
    state, actions = stop(state, Role.EVALUATOR)
    return state, [Say(text), *actions] if actions else []


def stop_expired(state: State) -> Result:
    """Continue the shutdown without the tasks that survived SIGKILL."""
    left = [task for task, s in state.tasks.items() if s.state is TaskState.STOPPING]
    actions: list[Action] = []
    for task in left:
        cause = "still alive after SIGKILL; its host may need a reboot"
        state, more = set_task(state, task, TaskState.LOST, cause=cause)
        actions += more
        failure = Failure(
            task=task,
            host=state.plan.tasks[task],
            cause=cause,
            run_exit_code=ExitCode.CONTACT_LOST,
            secondary=state.verdict is not None,
        )
        actions.append(failure)
        if state.verdict is None:
            state = replace(state, verdict=failure)
    return state, actions


def close_expired(state: State) -> Result:
    left = tuple(h for h, s in state.hosts.items() if s is not HostState.GONE)
    if not left:
        return state, []
    hosts = dict(state.hosts) | dict.fromkeys(left, HostState.GONE)
    state = replace(state, hosts=hosts)
    actions: list[Action] = [
        Say(
            f"warning: no answer from {', '.join(left)}; its processes may still be "
            "running"
        ),
        DropHosts(left),
    ]
    if state.verdict is None:
        failure = Failure(
            task=None,
            host=left[0],
            cause="its agent did not answer when the run ended",
            run_exit_code=ExitCode.CONTACT_LOST,
        )
        state = replace(state, verdict=failure, success=False)
        actions.append(failure)
    state, lost = _give_up(state)
    return state, [*actions, *lost]


def outcome(state: State) -> tuple[int, RunState]:
    if state.verdict is not None:
        code = state.verdict.run_exit_code
        by_task = state.verdict.task is not None and code is ExitCode.TASK_FAILED
        return run_code(state.codes) if by_task else code, RunState.FAILED
    if state.interrupted is not None:
        return state.interrupted, RunState.STOPPED
    return ExitCode.OK, RunState.SUCCEEDED


def run_code(codes: Collection[int | None]) -> int:
    """The tasks' own exit code if there is only one and it can be passed on, else 1."""
    if len(codes) != 1:
        return ExitCode.TASK_FAILED
    (code,) = codes
    if not code or code in _TAKEN or code >= _FIRST_OF_SIGNALS:
        return ExitCode.TASK_FAILED
    return code
