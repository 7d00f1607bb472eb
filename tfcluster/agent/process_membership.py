"""Which processes belong to a task: its tree, its session, and orphans that name it.

Only descendants of the agent are ever members, so that a reused pid cannot make a
stranger one. Sends no signals.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from tfcluster.agent import proc
from tfcluster.agent.light_dataclasses import dataclass
from tfcluster.agent.proc import Process, Table

TASK = "TFCLUSTER_TASK"
ATTEMPT = "TFCLUSTER_ATTEMPT"


@dataclass(frozen=True, slots=True)
class Identity:
    """By what a task's processes are known; ``leader`` is null before there is one."""

    task: str
    attempt: int
    leader: int | None
    output: str  # its pipe in the words of /proc: pipe:[INODE]
    waited_for: bool  # then the leader's pid may be anybody's


def members(
    table: Table,
    agent: int,
    identity: Identity,
    others: Collection[int] = (),
    environ: Callable[[int], Mapping[str, str]] = proc.environ,
    descriptors: Callable[[int], Collection[str]] = proc.descriptors,
) -> list[Process]:
    """The task's living processes; ``others`` are leaders that are not its own.

    An orphan (adopted by the agent) is the task's if the environment it was started
    with says so, or if it holds the task's output.
    """
    descendants = proc.family(table, [agent]) - {agent}
    strangers = proc.family(table, others, others)
    leader = set() if identity.leader is None else {identity.leader}
    roots = set() if identity.waited_for else set(leader)
    for pid in descendants - strangers:
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
        table[pid] for pid in found & descendants - strangers if not table[pid].dead
    ]
