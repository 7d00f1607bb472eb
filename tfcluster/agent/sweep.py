"""Finds and removes what is left of a run on this host, and nothing else.

A process belongs to a run if it descends from the run's agent, or if its initial
environment has the agent's marks; a folder belongs to it by its name.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress

from tfcluster.agent import proc
from tfcluster.agent.loop import Loop
from tfcluster.agent.proc import ProcessEntry, Table
from tfcluster.agent.signals import send

SWEEP_S = 5.0  # after that, processes that survive SIGKILL are reported
_SWEEP_INTERVAL_S = 0.02
RUN = "TFCLUSTER_RUN"
AGENT = "TFCLUSTER_AGENT"


def agent_mark(pid: int) -> str:
    process = proc.read(pid)
    return f"{pid}:{process.start_time if process else 0}"


def supervised(mark: str, table: Table, but: int) -> bool:
    """Whether the agent with this mark is alive and its pid is not ``but``."""
    pid, _, start_time = mark.partition(":")
    if not (pid.isdecimal() and start_time.isdecimal()) or int(pid) == but:
        return False
    agent = table.get(int(pid))
    return agent is not None and not agent.dead and agent.start_time == int(start_time)


def belongings(
    table: Table,
    run: str | None,
    agent: int,
    environ: Callable[[int], Mapping[str, str]] = proc.environ,
) -> list[ProcessEntry]:
    """Live processes of the run: descendants of ``agent``, and marked processes whose
    own agent is dead. Never ``agent`` itself or its ancestors."""
    spared = proc.ancestors(table, agent)
    descendants = proc.family(table, [agent])
    belonging = []
    for process in table.values():
        if process.dead or process.pid in spared:
            continue
        if process.pid in descendants:
            belonging.append(process)
        elif run:
            mark = _mark(process, run, environ)
            if mark is not None and not supervised(mark, table, but=agent):
                belonging.append(process)
    return belonging


def other_agents_remain(table: Table, run: str, agent: int) -> bool:
    return any(
        supervised(_mark(process, run, proc.environ) or "", table, but=agent)
        for process in table.values()
        if not process.dead
    )


def _mark(
    process: ProcessEntry, run: str, environ: Callable[[int], Mapping[str, str]]
) -> str | None:
    """The mark of a process's agent; None if the process is not part of our run."""
    if proc.uid_of(process.pid) != os.geteuid():
        return None
    marks = environ(process.pid)
    return marks.get(AGENT, "") if marks.get(RUN) == run else None


def sweep(run: str | None) -> list[ProcessEntry]:
    """SIGKILL the run's processes, wait for their end, and return them."""
    loop = Loop()
    swept: list[ProcessEntry] = []

    def find() -> list[ProcessEntry]:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        return belongings(proc.snapshot(), run, os.getpid())

    def done(killed: list[ProcessEntry], _left: list[ProcessEntry]) -> None:
        swept.extend(killed)
        loop.stop()

    kill_until_gone(loop, find, done)
    loop.run()
    return swept


def clear_away(run: str | None) -> None:
    """Remove folders ``tfcluster-UID-RUN-WHAT``, which tasks keep between attempts."""
    start = f"tfcluster-{os.geteuid()}-{run}-"
    for folder in {os.environ.get("TMPDIR") or "/tmp", "/tmp"} if run else ():
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(start) and entry.is_dir(follow_symlinks=False):
                    import shutil  # only here: it takes long to import

                    shutil.rmtree(entry.path, ignore_errors=True)


def kill_until_gone(
    loop: Loop,
    find: Callable[[], list[ProcessEntry]],
    done: Callable[[list[ProcessEntry], list[ProcessEntry]], None],
) -> None:
    """SIGKILL what ``find`` returns until it returns nothing, for at most ``SWEEP_S``.

    A process may fork between ``find`` and the signal, so this is repeated. ``done``
    gets all killed processes and those that are still alive.
    """
    deadline = loop.now() + SWEEP_S
    killed: dict[int, ProcessEntry] = {}

    def step() -> None:
        alive = find()
        for process in alive:
            send(process, signal.SIGKILL)
            killed[process.pid] = process
        if alive and loop.now() < deadline:
            loop.later(_SWEEP_INTERVAL_S, step)
        else:
            done(list(killed.values()), alive)

    step()
