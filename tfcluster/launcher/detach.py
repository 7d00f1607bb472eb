"""Launches in the background: the launcher continues in its own session."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

from tfcluster.base.errors import ExitCode, ResourceError, TfclusterError
from tfcluster.record.files import open_private
from tfcluster.record.paths import RunPaths

_PR_SET_PDEATHSIG = 1

Launch: TypeAlias = Callable[[Callable[[RunPaths], None]], int]
"""Runs a launch to its end and returns the exit code. Calls its argument once there is
a run."""


def detached(launch: Launch, *, orphaned: Callable[[], None] | None = None) -> str:
    """Run ``launch`` in a child that outlives us; returns the run id once there is one.

    With ``orphaned``, the child ends the run if we die, as if it got SIGTERM, and then
    calls ``orphaned``. Raises the TfclusterError that prevented the run. Must be called
    before any thread is started, because it forks.
    """
    reading, writing = os.pipe()
    parent = os.getpid()
    if os.fork():
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            return _result(pipe.read())
    os.close(reading)
    code = ExitCode.RESOURCES
    try:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if orphaned is not None:
            _end_with(parent)
        code = ExitCode(_launch(launch, writing))
    finally:
        try:
            if orphaned is not None and os.getppid() != parent:
                orphaned()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def leave_terminal(paths: RunPaths) -> None:
    """Redirect this process's output to a file of the record; take its input away.

    For a submitted run, the file has the messages of the launcher in the job: a
    follower of the job writes none.
    """
    if paths.job.exists():
        log = os.open(os.devnull, os.O_WRONLY)
    else:
        log = open_private(paths.launcher_log, os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)


def _end_with(parent: int) -> None:
    """Get SIGTERM when the parent dies, see prctl(2), or now if it is already dead."""
    import ctypes  # imported here: few commands need it

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def _launch(launch: Launch, writing: int) -> int:
    def begun(paths: RunPaths) -> None:
        leave_terminal(paths)
        _report(writing, {"run": paths.run})

    try:
        return launch(begun)
    except TfclusterError as error:
        _report(writing, {"error": error.lines(), "code": int(error.exit_code)})
        return int(error.exit_code)


def _report(writing: int, message: dict[str, Any]) -> None:
    try:
        os.write(writing, json.dumps(message).encode())
        os.close(writing)
    except OSError:
        pass  # the message was already sent, or the reader is gone


def _result(data: bytes) -> str:
    message = json.loads(data) if data else {}
    if run := message.get("run"):
        return str(run)
    raise _Relayed(
        message.get("error") or ["error: the launcher exited before the run started"],
        ExitCode(message.get("code", ExitCode.RESOURCES)),
    )


class _Relayed(ResourceError):
    def __init__(self, lines: list[str], code: ExitCode) -> None:
        super().__init__("\n".join(lines))
        self._lines = lines
        self.exit_code = code

    def lines(self) -> list[str]:
        return self._lines
