"""What a kept interpreter must not outlive: its user's login, or a scheduler's job."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tfcluster.agent import proc
from tfcluster.agent.proc import Process
from tfcluster.import_variables import JOB_NAMES


def login() -> str | None:
    """The file in which systemd says whether this user is logged in, or None."""
    path = f"/run/systemd/users/{os.geteuid()}"
    return path if os.path.isfile(path) else None


def job(environ: Mapping[str, str]) -> Process | None:
    """The first process of the scheduler's job that we are in; None if in no job.

    Not all schedulers end processes that have left the session of the job's script.
    """
    ours = {f"{name}={environ[name]}" for name in JOB_NAMES if environ.get(name)}
    first = None
    if ours:
        table = proc.snapshot()
        process = table.get(os.getppid())
        while process is not None and ours <= _entries(process.pid):
            first, process = process, table.get(process.ppid)
    return first


def _entries(pid: int) -> set[str]:
    """The environment with which a process was started; empty if it is not ours."""
    try:
        return set(proc.text_of(f"{proc.PROC}/{pid}/environ").split("\0"))
    except OSError:
        return set()
