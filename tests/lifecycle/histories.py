"""Helpers that write a run as a list of events, and inspect the resulting actions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tfcluster.base.states import RunState, TaskState
from tfcluster.base.task_id import TaskId
from tfcluster.lifecycle import begin, step
from tfcluster.lifecycle.actions import (
    Action,
    CloseHosts,
    Failure,
    Finish,
    Replan,
    SetDeadline,
    SetRunState,
    SetTaskState,
    StartTasks,
    StopTasks,
)
from tfcluster.lifecycle.events import (
    Event,
    Expired,
    HostClosed,
    HostReady,
    TaskExited,
    TaskListening,
    TaskSettled,
    TaskStarted,
)
from tfcluster.lifecycle.state import Plan, Role, State

CHIEF, W0, W1 = TaskId("chief", 0), TaskId("worker", 0), TaskId("worker", 1)
PS, EVALUATOR = TaskId("ps", 0), TaskId("evaluator", 0)
ROLES = {
    "chief": Role.TRAINING,
    "worker": Role.TRAINING,
    "ps": Role.SERVER,
    "evaluator": Role.EVALUATOR,
}


def plan(
    *tasks: TaskId,
    hosts: Sequence[str] = ("h1",),
    max_restarts: int = 0,
    restart_alone: bool = False,
    min_training: int | None = None,
) -> Plan:
    """Return a plan with these tasks, assigned to the hosts in turn."""
    return Plan(
        tasks={task: hosts[i % len(hosts)] for i, task in enumerate(tasks)},
        roles={task: ROLES[task.type] for task in tasks},
        listeners=frozenset(task for task in tasks if task.type == "ps"),
        max_restarts=max_restarts,
        restart_alone=restart_alone,
        min_training=min_training,
    )


class History:
    """Feeds events and collects all actions; time passes only through events."""

    def __init__(self, plan: Plan, earlier: Sequence[float] = ()) -> None:
        self.state: State
        self.state, self.actions = begin(plan, earlier)

    def feed(self, *events: Event) -> list[Action]:
        """Feed the events; returns all actions that result."""
        new: list[Action] = []
        for event in events:
            self.state, actions = step(self.state, event)
            new += actions
        self.actions += new
        return new

    def up(self) -> list[Action]:
        """Start all tasks and report them as running."""
        hosts = dict.fromkeys(self.state.plan.tasks.values())
        actions = self.feed(*map(HostReady, hosts))
        for task in self.state.plan.tasks:
            attempt = self.state.tasks[task].attempt
            actions += self.feed(TaskStarted(task, attempt))
            if task in self.state.plan.listeners:
                actions += self.feed(TaskListening(task, attempt))
        return actions

    def exits(
        self, task: TaskId, code: int | None = 0, *, signal: str | None = None
    ) -> list[Action]:
        """End a task that was not told to stop."""
        attempt = self.state.tasks[task].attempt
        cause = None if code == 0 else f"cause of {task}"
        return self.feed(
            TaskExited(
                task=task, attempt=attempt, code=code, signal=signal, cause=cause
            ),
            TaskSettled(task, attempt),
        )

    def obey(self, *tasks: TaskId, signal: str = "SIGTERM") -> list[Action]:
        """End tasks that were told to stop; they leave nothing behind."""
        actions: list[Action] = []
        for task in tasks:
            attempt = self.state.tasks[task].attempt
            actions += self.feed(
                TaskExited(
                    task=task,
                    attempt=attempt,
                    code=None,
                    signal=signal,
                    cause=f"ended by {signal}",
                    stopped=True,
                ),
                TaskSettled(task, attempt),
            )
        return actions

    def judged(self) -> list[Action]:
        """End the time in which failures are collected."""
        return self.feed(Expired("verdict"))

    def closed(self) -> list[Action]:
        """Close all agents."""
        return self.feed(*map(HostClosed, self.state.hosts))

    @property
    def finish(self) -> Finish | None:
        return next((a for a in self.actions if isinstance(a, Finish)), None)

    @property
    def code(self) -> int | None:
        return self.finish.exit_code if self.finish else None

    @property
    def verdict(self) -> Failure | None:
        return self.state.verdict

    def task_states(self, task: TaskId) -> list[TaskState]:
        return [
            a.state
            for a in self.actions
            if isinstance(a, SetTaskState) and a.task == task
        ]

    @property
    def run_states(self) -> list[RunState]:
        return [a.state for a in self.actions if isinstance(a, SetRunState)]


def started(actions: Iterable[Action]) -> list[TaskId]:
    return [t for a in actions if isinstance(a, StartTasks) for t in a.tasks]


def stopped(actions: Iterable[Action]) -> list[tuple[TaskId, str]]:
    return [(t, a.signal) for a in actions if isinstance(a, StopTasks) for t in a.tasks]


def replans(actions: Iterable[Action]) -> list[frozenset[str]]:
    return [a.hosts for a in actions if isinstance(a, Replan)]


def closing(actions: Iterable[Action]) -> bool:
    return any(isinstance(a, CloseHosts) for a in actions)


def deadlines(actions: Iterable[Action]) -> dict[str, float]:
    return {a.name: a.after_s for a in actions if isinstance(a, SetDeadline)}
