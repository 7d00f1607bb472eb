"""Launches in the background: the launcher continues in its own session."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

from tfcluster.base import errors
from tfcluster.base.errors import (
    ConfigError,
    ExitCode,
    Problem,
    ResourceError,
    TfclusterError,
)
from tfcluster.record.files import open_private
from tfcluster.record.paths import RunPaths

Launch: TypeAlias = Callable[[Callable[[RunPaths], None]], int]
"""Runs a launch to its end and returns the exit code. Calls its argument once there is
a run."""


def detached(launch: Launch, *, orphaned: Callable[[], None] | None = None) -> str:
    """Run ``launch`` in a child that outlives us; returns the run's id.

    With ``orphaned``, the child ends the run if we die, and calls it. Raises what
    prevented the run. Must be called before any thread is started, because it forks.
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
            end_with(parent)
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
    """Send our output to the record (in a job: nowhere), and take our input away."""
    if paths.job.exists():
        log = os.open(os.devnull, os.O_WRONLY)
    else:
        log = open_private(paths.launcher_log, os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)


def end_with(parent: int) -> None:
    """Get SIGTERM once the program is gone, by a pidfd that no child can keep open."""
    try:
        handle = os.pidfd_open(parent)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGTERM)
        return

    def watch() -> None:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll()
        sys.stderr.write("the program that launched this run has ended: stopping\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGTERM)

    if os.getppid() != parent:  # it was already gone, and its pid may be reused
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=watch, daemon=True).start()


def _launch(launch: Launch, writing: int) -> int:
    def begun(paths: RunPaths) -> None:
        leave_terminal(paths)
        _report(writing, {"run": paths.run})

    try:
        return launch(begun)
    except TfclusterError as error:
        _report(writing, {"error": error_to_plain(error)})
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
    if error := message.get("error"):
        raise error_from_plain(error)
    raise ResourceError("the launcher exited before the run started")


def error_to_plain(error: TfclusterError) -> dict[str, Any]:
    kinds = (kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    return {
        "kind": next(kinds).__name__,
        "message": error.message,
        "hint": error.hint,
        "code": int(error.exit_code),
        "problems": error.problems if isinstance(error, ConfigError) else (),
    }


def error_from_plain(plain: dict[str, Any]) -> TfclusterError:
    """The original error: of the same class, with the same words and exit code."""
    if plain["kind"] == ConfigError.__name__:
        return ConfigError([Problem(*problem) for problem in plain["problems"]])
    kind = getattr(errors, plain["kind"])
    error: TfclusterError = kind(plain["message"], hint=plain["hint"])
    error.exit_code = ExitCode(plain["code"])
    if error.hint and hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(f"hint: {error.hint}")
    return error
