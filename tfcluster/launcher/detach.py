"""Launches in the background: the launcher continues in a session of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from tfcluster.errors import ExitCode, ResourceError, TfclusterError
from tfcluster.record.files import open_private
from tfcluster.record.paths import RunPaths


def detached(launch: Callable[[Callable[[RunPaths], None]], int]) -> str:
    """Run ``launch`` in a child that outlives us; returns the run id once there is one.

    Raises the TfclusterError that prevented the run. Must be called before any thread
    is started, because it forks.
    """
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            return _result(pipe.read())
    os.close(reading)
    code = ExitCode.RESOURCES
    try:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        code = ExitCode(_launch(launch, writing))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _launch(launch: Callable[[Callable[[RunPaths], None]], int], writing: int) -> int:
    def begun(paths: RunPaths) -> None:
        """Redirect output from the terminal to a file, and report the run id."""
        log = open_private(paths.launcher_log, os.O_WRONLY | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(log)
        os.close(nothing)
        _tell(writing, {"run": paths.run})

    try:
        return launch(begun)
    except TfclusterError as error:
        _tell(writing, {"error": error.lines(), "code": int(error.exit_code)})
        return int(error.exit_code)


def _tell(writing: int, message: dict[str, Any]) -> None:
    try:
        os.write(writing, json.dumps(message).encode())
        os.close(writing)
    except OSError:
        pass  # already told, or the reader is gone


def _result(data: bytes) -> str:
    message = json.loads(data) if data else {}
    if run := message.get("run"):
        return str(run)
    raise _Relayed(
        message.get("error") or ["error: the launcher exited before the run started"],
        ExitCode(message.get("code", ExitCode.RESOURCES)),
    )


class _Relayed(ResourceError):
    """The child's error, with its text and exit code."""

    def __init__(self, lines: list[str], code: ExitCode) -> None:
        super().__init__("\n".join(lines))
        self._lines = lines
        self.exit_code = code

    def lines(self) -> list[str]:
        return self._lines
