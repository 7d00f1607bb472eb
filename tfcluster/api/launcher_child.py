"""Starts the process that drives a run, and watches for its end."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from tfcluster.base import errors
from tfcluster.base.errors import (
    ConfigError,
    ExitCode,
    Problem,
    ResourceError,
    TfclusterError,
)
from tfcluster.base.isolated_import import module_argv
from tfcluster.plan.description_json import to_plain
from tfcluster.plan.model import Description

_PROCESS = "tfcluster.api.launcher_process"
_SHOWN_LINES = 10


class LauncherChild:
    """The launcher of a run, as a child of the process that made this object."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._parent = os.getpid()
        self._ended = threading.Event()
        # This thread also takes the exit status if nobody waits for the run.
        threading.Thread(
            target=self._watch, name=f"tfcluster-{process.pid}", daemon=True
        ).start()

    def _watch(self) -> None:
        self._process.wait()
        self._ended.set()

    @property
    def is_ours(self) -> bool:
        """Whether we are its parent: False in a process that the parent has forked."""
        return os.getpid() == self._parent

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the launcher to end; False if it still runs after ``timeout_s``."""
        return self._ended.wait(timeout_s)


def start(
    description: Description,
    environ: Mapping[str, str],
    *,
    detach: bool,
    scratch: Path | None,
) -> tuple[str, LauncherChild]:
    """Begin a run; returns its id. Raises the TfclusterError that prevented it.

    When the launcher ends, it removes ``scratch`` if this process is gone by then.
    """
    asked = {
        "description": to_plain(description),
        "parent": os.getpid(),
        "detach": detach,
        "scratch": None if scratch is None else str(scratch),
    }
    with tempfile.TemporaryFile() as said:
        process, answer = _started(asked, environ, said)
        try:
            line = answer.readline()
        except BaseException:  # Ctrl-C: nobody would know about the run
            process.terminate()
            process.wait()
            raise
        finally:
            answer.close()
        child = LauncherChild(process)
        if not line:
            child.wait(None)
            said.seek(0)
            raise _died(process.returncode, said.read())
    told: dict[str, Any] = json.loads(line)
    if "error" in told:
        child.wait(None)
        raise error_from_plain(told["error"])
    return str(told["run"]), child


def _started(
    asked: Mapping[str, Any], environ: Mapping[str, str], said: IO[bytes]
) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Start the process; returns it and the pipe on which it answers."""
    reading, writing = _pipe()
    try:
        process = subprocess.Popen(
            module_argv((sys.executable,), _PROCESS, str(writing)),
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            env=dict(environ),
            pass_fds=(writing,),
            # Ctrl-C is for the caller, which may go on, stop the run, or wait for it.
            start_new_session=True,
        )
    except OSError as error:
        os.close(reading)
        raise ResourceError(
            f"the launcher cannot be started: {sys.executable}: {error.strerror}"
        ) from error
    finally:
        os.close(writing)
    assert process.stdin is not None  # it is a pipe
    try:
        with process.stdin:
            process.stdin.write(json.dumps(asked).encode())
    except BrokenPipeError:
        pass  # it has ended: its output says why
    return process, os.fdopen(reading, "rb")


def _pipe() -> tuple[int, int]:
    """A pipe above the standard descriptors, which the program may have closed."""
    low = os.pipe()
    first, second = (fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 3) for each in low)
    for each in low:
        os.close(each)
    return first, second


def _died(code: int, said: bytes) -> ResourceError:
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    lines = said.decode(errors="backslashreplace").splitlines()[-_SHOWN_LINES:]
    return ResourceError(
        f"the launcher ended before the run started ({how})",
        hint="\n".join(["it said:", *lines]) if lines else None,
    )


def error_to_plain(error: TfclusterError) -> dict[str, Any]:
    """The error as JSON types."""
    kinds = (kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    return {
        "kind": next(kinds).__name__,
        "message": error.message,
        "hint": error.hint,
        "code": int(error.exit_code),
        "problems": [list(problem) for problem in error.problems]
        if isinstance(error, ConfigError)
        else [],
    }


def error_from_plain(found: dict[str, Any]) -> TfclusterError:
    """The original error: of the same class, with the same words and exit code."""
    kind = getattr(errors, found["kind"])
    error: TfclusterError
    if kind is ConfigError:
        error = ConfigError([Problem(*problem) for problem in found["problems"]])
    else:
        error = kind(found["message"], hint=found["hint"])
    error.exit_code = ExitCode(found["code"])
    return shown(error)


def shown(error: TfclusterError) -> TfclusterError:
    """The error, with its hint in what Python prints (from Python 3.11 on)."""
    if error.hint and hasattr(error, "add_note"):
        error.add_note(f"hint: {error.hint}")
    return error
