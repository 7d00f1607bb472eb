"""Handles requests for stacks: asks running tasks, whose answers go to the record."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from tfcluster.launcher.journal import Journal
from tfcluster.protocol.requests import Request, Stacks
from tfcluster.task_id import TaskId


def ask_stacks(
    number: str,
    tasks: Collection[str],
    running: Mapping[TaskId, str],
    send: Callable[[str, Request], None],
    journal: Journal,
) -> None:
    """Ask those of the running tasks (task -> host), or all if ``tasks`` is empty.

    The event ``asked`` says which ones; an event ``stack`` follows for each answer.
    """
    chosen = {
        str(task): host
        for task, host in running.items()
        if not tasks or str(task) in tasks
    }
    journal.event("asked", request=number, tasks=sorted(chosen))
    for host in set(chosen.values()):
        send(host, Stacks(tuple(t for t, where in chosen.items() if where == host)))
