"""A turn of the run, with the transitions that several events share. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from tfcluster.base.light_dataclasses import replace
from tfcluster.base.states import RunState, TaskState
from tfcluster.base.task_id import TaskId
from tfcluster.lifecycle import actions
from tfcluster.lifecycle.state import HostState, Phase, Role, Stage, State, TaskStatus

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
        """The turn changes a copy of ``state``."""
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
        """Have all agents exit."""
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
        """Stop all live tasks of these roles."""
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
