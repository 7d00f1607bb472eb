"""What must be true after every run, however it ended."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from tests.kit import machine
from tests.kit.cluster import Cluster, Running, is_final
from tests.kit.waiting import eventually

AFTER_S = 15.0


def assert_nothing_left(running: Running, *, report: bool = True) -> None:
    """Check that no process, listener or lock is left, and that the record is final.

    Waits at most 15 s for that. ``report``: the launcher lived to write its report.
    """
    deadline = time.monotonic() + AFTER_S
    eventually(
        lambda: not _left(running),
        lambda: f"{running.run} has left {_left(running)}; {running.err}",
        deadline - time.monotonic(),
    )
    status = running.cluster.recorded(running.run)
    assert is_final(status["state"]), status
    for task in status["tasks"]:
        assert is_final(task["state"]), status
    if report:
        written = running.report()
        assert status["state"] != "lost"
        assert written["state"] == status["state"]
        assert written["exit_code"] == status["exit_code"]
        assert written["tasks"] == status["tasks"]
        assert written["first_failure"] == status["first_failure"]


def assert_nothing_runs(cluster: Cluster) -> None:
    """Check that no process started by a command of this cluster is left."""
    eventually(
        lambda: not cluster.processes(),
        lambda: str({pid: machine.cmdline(pid) for pid in cluster.processes()}),
        AFTER_S,
    )


def _left(running: Running) -> list[str]:
    # Guard, agent and tasks all inherit the launcher's environment; the agent adds the
    # run's marker to the environment of tasks only.
    marked = set(machine.carrying(f"TFCLUSTER_RUN={running.run}"))
    marked |= set(running.cluster.processes())
    found = [f"{pid} {machine.cmdline(pid)}" for pid in marked if machine.is_alive(pid)]
    kept = f"tfcluster-{os.geteuid()}-{running.run}-*"
    found += map(str, Path(tempfile.gettempdir()).glob(kept))
    listening = set(machine.listening_ports())
    found += [f"port {port}" for port in _ports(running) if port in listening]
    if machine.is_locked(running.folder / "lock"):
        found.append("the lock")
    return found


def _ports(running: Running) -> list[int]:
    try:
        tasks = running.plan()["tasks"]
    except FileNotFoundError:
        return []
    ends = [str(t["address"]).rpartition(":")[2] for t in tasks if t["address"]]
    return [int(end) for end in ends if end.isdecimal()]
