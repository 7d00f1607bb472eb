"""Finds the processes of a task: its tree, its session, and orphans with its marks.

Only descendants of the agent can be members, so a foreign process with a reused pid
never is one. Sends no signals.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from tfcluster.agent import proc
from tfcluster.agent.proc import ProcessEntry, Table
from tfcluster.light_dataclasses import dataclass

TASK = "TFCLUSTER_TASK"
ATTEMPT = "TFCLUSTER_ATTEMPT"


@dataclass(frozen=True, slots=True)
class Identity:
    """What identifies a task's processes; ``leader`` is None before there is one."""

    task: str
    attempt: int
    leader: int | None
    output: str  # its pipe as /proc shows it: pipe:[INODE]
    waited_for: bool  # the leader was reaped, so its pid may have been reused


def members(
    table: Table,
    agent: int,
    identity: Identity,
    others: Collection[int] = (),
    environ: Callable[[int], Mapping[str, str]] = proc.environ,
    descriptors: Callable[[int], Collection[str]] = proc.descriptors,
) -> list[ProcessEntry]:
    """The task's live processes; ``others`` are the leaders of other tasks.

    An orphan (adopted by the agent) belongs to the task if its initial environment says
    so, or if it holds the task's output pipe.
    """
    descendants = proc.family(table, [agent]) - {agent}
    of_other_tasks = proc.family(table, others, others)
    leader = set() if identity.leader is None else {identity.leader}
    roots = set() if identity.waited_for else set(leader)
    for pid in descendants - of_other_tasks:
        if table[pid].ppid != agent or pid == identity.leader:
            continue
        marks = environ(pid)
        names = (marks.get(TASK), marks.get(ATTEMPT))
        if names == (identity.task, str(identity.attempt)) or (
            identity.output in descriptors(pid)
        ):
            roots.add(pid)
    found = proc.family(table, roots, leader)
    return [
        table[pid]
        for pid in found & descendants - of_other_tasks
        if not table[pid].dead
    ]
