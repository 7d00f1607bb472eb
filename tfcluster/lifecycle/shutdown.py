"""Shuts down a run that does not succeed by itself. Pure.

Either the user interrupts it, up to three times, or a deadline passes.
"""

from __future__ import annotations

from collections.abc import Collection

from tfcluster.base.errors import ExitCode
from tfcluster.base.states import RunState, TaskState
from tfcluster.lifecycle import actions
from tfcluster.lifecycle.failures import fail, reach_verdict
from tfcluster.lifecycle.state import (
    HostState,
    Phase,
    Role,
    Stage,
    State,
    Turn,
    alive,
    any_alive,
    first_of,
    is_up,
    remaining_hosts,
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


def interrupt(turn: Turn, code: ExitCode) -> None:
    """The run was told to end: stop it, the next time kill it, the third time leave."""
    state = turn.state
    if state.fetching:
        text = "stopped fetching: results that are not here stay on the hosts"
        turn.say(text)
        turn.act(actions.LeaveResults("the fetch was interrupted"))
        return
    _excuse(turn)
    state.interrupts += 1
    if state.interrupted is not None and state.interrupts == 1:
        return  # a host has already reported the same request
    if state.verdict is None and state.interrupted is None:
        state.interrupted = code
    if state.phase is not Phase.ENDING:
        _stop_gently(turn, code)
    elif not state.killing:
        _kill(turn)
    else:
        _leave(turn)


def stopped_elsewhere(turn: Turn) -> None:
    """Handle an agent that somebody else told to end, such as a step of Slurm."""
    _excuse(turn)
    if turn.state.phase is not Phase.ENDING:
        turn.state.interrupted = ExitCode.TERMINATED
        _stop_gently(turn, ExitCode.TERMINATED)


def _stop_gently(turn: Turn, code: ExitCode) -> None:
    state = turn.state
    state.signal = _SIGNALS.get(code, "TERM")
    word = _WORDS.get(code, "stop requested")
    interactive = code is ExitCode.INTERRUPTED
    tip = " (press Ctrl-C again to kill them)" if interactive else ""
    grace = f"{state.plan.grace_s:g} s"
    turn.say(f"{word}: stopping all tasks; they have {grace} to exit{tip}")
    turn.end(reason=word)


def _excuse(turn: Turn) -> None:
    """Drop pending failures by SIGTERM, because the run was told to end.

    Schedulers signal agents, tasks and the launcher in any order: a task that has just
    died of SIGTERM was stopped, and so were its peers, unless something else failed.
    """
    state = turn.state
    stopped = [failure for failure in state.pending if failure.signal == "SIGTERM"]
    rest = tuple(failure for failure in state.pending if failure not in stopped)
    if all(failure.secondary for failure in rest):
        stopped, rest = [*state.pending], ()
    state.pending = rest
    for failure in stopped:
        task = failure.task
        if task is not None and state.tasks[task].state is TaskState.FAILED:
            turn.set_task(task, TaskState.STOPPED, signal=failure.signal)
    reach_verdict(turn)


def _kill(turn: Turn) -> None:
    state = turn.state
    state.killing = True
    turn.say("killing all tasks now")
    left = tuple(task for task, status in state.tasks.items() if alive(status))
    if left:
        turn.act(actions.StopTasks(left, "KILL", 0))
    if state.stage is Stage.HOSTS:
        turn.close(0)


def fetch(turn: Turn) -> None:
    """Fetch the files of tasks, if any has started, unless the end is urgent."""
    state, plan = turn.state, turn.state.plan
    hosts = tuple(h for h, word in state.hosts.items() if word is HostState.READY)
    ran = any(status.state is not TaskState.PENDING for status in state.tasks.values())
    if not (plan.results and ran):
        return
    # At the limit itself, the scheduler sends another signal, which ends the fetch.
    in_time = plan.requeues and state.interrupted is ExitCode.TIME_LIMIT
    why_not = None
    if state.killing:
        why_not = "the run was told to end at once"
    elif plan.hurried and state.interrupted in _OF_SCHEDULER and not in_time:
        why_not = "the scheduler ends the job"
    state.fetching = why_not is None
    turn.act(actions.FetchResults(hosts, why_not))


def say_too_late(turn: Turn) -> None:
    """Say that tasks did not end by themselves when they were told to."""
    state = turn.state
    if state.killed and state.interrupted is not None:
        names = first_of(sorted(str(task) for task in state.killed))
        text = (
            f"warning: killed after {state.plan.grace_s:g} s (grace): {names}. What "
            "they had not saved by then is lost, and a file that they were writing may "
            "be incomplete"
        )
        turn.say(text)


def _leave(turn: Turn) -> None:
    """Exit at once, on the third interrupt, and say which tasks may still run."""
    state = turn.state
    left = [str(task) for task, status in state.tasks.items() if alive(status)]
    may_run = f"; may still be running: {', '.join(left)}" if left else ""
    turn.say(f"exiting now{may_run}")
    _give_up(turn)
    code, word = outcome(state)
    state.phase = Phase.OVER
    turn.act(
        actions.DropHosts(remaining_hosts(state)),
        actions.SetRunState(word),
        actions.Finish(word, code),
    )


def _give_up(turn: Turn) -> None:
    for task, status in turn.state.tasks.items():
        if not status.state.final:
            word = TaskState.LOST if alive(status) else TaskState.STOPPED
            turn.set_task(task, word)


def start_expired(turn: Turn) -> None:
    state = turn.state
    if state.started or state.phase is Phase.ENDING:
        return
    if state.phase is Phase.GATHERING:
        late = [h for h, word in state.hosts.items() if word is HostState.STARTING]
    else:
        late = [str(task) for task in state.tasks if not is_up(state, task)]
    timeout = f"start_timeout ({state.plan.start_timeout_s:g} s)"
    cause = f"not ready after {timeout}: {first_of(late)}"
    fail(turn, actions.Failure(cause=cause, run_exit_code=ExitCode.START))


def evaluator_expired(turn: Turn) -> None:
    if any_alive(turn.state, Role.EVALUATOR):
        late = f"still running {EVALUATOR_GRACE_S:g} s after training"
        turn.say(f"the evaluator is {late}; stopping it")
        turn.stop(Role.EVALUATOR)


def stop_expired(turn: Turn) -> None:
    """Continue the shutdown without the tasks that survived SIGKILL."""
    state = turn.state
    for task, status in state.tasks.items():
        if status.state is not TaskState.STOPPING:
            continue
        cause = "still alive after SIGKILL; its host may need a reboot"
        turn.set_task(task, TaskState.LOST, cause=cause)
        failure = actions.Failure(
            task=task,
            host=state.plan.tasks[task],
            cause=cause,
            run_exit_code=ExitCode.CONTACT_LOST,
            secondary=state.verdict is not None,
        )
        turn.act(failure)
        state.verdict = state.verdict or failure


def close_expired(turn: Turn) -> None:
    state = turn.state
    left = remaining_hosts(state)
    if not left:
        return
    state.hosts |= dict.fromkeys(left, HostState.GONE)
    silent = f"no answer from {', '.join(left)}"
    turn.say(f"warning: {silent}; its processes may still be running")
    turn.act(actions.DropHosts(left))
    if state.verdict is None:
        cause = "its agent did not answer when the run ended"
        code = ExitCode.CONTACT_LOST
        state.verdict = actions.Failure(host=left[0], cause=cause, run_exit_code=code)
        state.success = False
        turn.act(state.verdict)
    _give_up(turn)


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
