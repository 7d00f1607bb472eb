"""Handles requests for stacks: asks running tasks, whose answers go to the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tfcluster.launcher.journal import Journal
from tfcluster.protocol.requests import Request, Stacks
from tfcluster.task_id import TaskId


def ask_stacks(
    number: str,
    request: Mapping[str, Any],
    running: Mapping[TaskId, str],
    send: Callable[[str, Request], None],
    journal: Journal,
) -> None:
    """Ask the running tasks (task -> host) that the request names, or else all tasks.

    The event ``asked`` says which ones; an event ``stack`` follows for each answer.
    """
    names = request.get("tasks")
    chosen = {
        str(task): host
        for task, host in running.items()
        if not isinstance(names, list) or not names or str(task) in names
    }
    journal.event("asked", request=number, tasks=sorted(chosen))
    for host in set(chosen.values()):
        send(host, Stacks(tuple(t for t, where in chosen.items() if where == host)))
