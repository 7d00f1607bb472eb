"""Starts the process that drives a run, and watches for its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from tfcluster.base.errors import ResourceError
from tfcluster.base.isolated_import import module_argv
from tfcluster.launcher.detach import error_from_plain
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
    request = {
        "description": to_plain(description),
        "parent": os.getpid(),
        "detach": detach,
        "scratch": None if scratch is None else str(scratch),
    }
    with tempfile.TemporaryFile() as output:
        process = _started(environ, output)
        assert process.stdin is not None  # both are pipes
        assert process.stdout is not None
        try:
            with process.stdout as answers:
                _send(process.stdin, request)
                line = answers.readline()
        except BaseException:  # Ctrl-C: nobody would know about the run
            process.terminate()
            process.wait()
            raise
        child = LauncherChild(process)
        if not line:
            child.wait(None)
            output.seek(0)
            raise _died(process.returncode, output.read())
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        child.wait(None)
        raise error_from_plain(answer["error"])
    return str(answer["run"]), child


def _started(environ: Mapping[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            module_argv((sys.executable,), _PROCESS),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env=dict(environ),
            # Ctrl-C is for the caller, which may go on, stop the run, or wait for it.
            start_new_session=True,
        )
    except OSError as error:
        raise ResourceError(
            f"the launcher cannot be started: {sys.executable}: {error.strerror}"
        ) from error


def _send(pipe: IO[bytes], request: Mapping[str, Any]) -> None:
    try:
        with pipe:
            pipe.write(json.dumps(request).encode())
    except BrokenPipeError:
        pass  # it has ended: its output says why


def _died(code: int, output: bytes) -> ResourceError:
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    lines = output.decode(errors="backslashreplace").splitlines()[-_SHOWN_LINES:]
    return ResourceError(
        f"the launcher ended before the run started ({how})",
        hint="\n".join(["it said:", *lines]) if lines else None,
    )
