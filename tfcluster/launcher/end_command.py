"""Runs the user's command at the end of a run (``on_end``).

The command gets the outcome as JSON on its standard input. We add no arguments and use
no shell. Whatever the command does causes a warning at most.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tfcluster.model import Description
from tfcluster.record.files import open_private
from tfcluster.record.logs import last_lines
from tfcluster.record.paths import RunPaths

LIMIT_S = 60.0
"""How long the command may take."""
_TERM_S = 2.0
"""How long the command may take to end after SIGTERM."""
_POLL_S = 0.1


def run_end_command(
    description: Description,
    paths: RunPaths,
    outcome: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    is_interrupted: Callable[[], bool],
    limit_s: float = LIMIT_S,
) -> str | None:
    """Run the Description's ``on_end``; returns why it failed, or None.

    ``outcome`` is the object of ``status --json``. The command's output goes to a file
    of the record. The command is ended after ``limit_s`` seconds, or as soon as
    ``is_interrupted()`` is true.
    """
    argv = description.on_end
    if not argv:
        return None
    given = {**outcome, "folder": str(paths.root)}
    folder = description.workdir if description.workdir.is_dir() else paths.root
    try:
        with contextlib.ExitStack() as stack:
            log = open_private(paths.end_log, os.O_WRONLY | os.O_APPEND)
            stack.callback(os.close, log)
            # A file, not a pipe: a command that reads nothing must not block us.
            inbox = os.memfd_create("outcome")
            stack.callback(os.close, inbox)
            with os.fdopen(os.dup(inbox), "wb") as file:
                file.write(json.dumps(given, default=str).encode() + b"\n")
            os.lseek(inbox, 0, os.SEEK_SET)
            process = subprocess.Popen(
                argv,
                stdin=inbox,
                stdout=log,
                stderr=log,
                cwd=folder,
                env=dict(environ),
                start_new_session=True,
            )
    except OSError as error:
        return f"{argv[0]} cannot be run: {error.strerror}"
    code = _wait(process, limit_s, is_interrupted)
    if code is None:
        why = f"it took longer than {limit_s:g} s"
        return f"{why} and was ended" if not is_interrupted() else "it was interrupted"
    if code == 0:
        return None
    how = f"exit code {code}" if code > 0 else f"signal {-code}"
    return f"{how}{_last_words(paths.end_log)}"


def _wait(
    process: subprocess.Popen[bytes], limit_s: float, is_interrupted: Callable[[], bool]
) -> int | None:
    """The command's exit code; None if it had to be ended."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until and not is_interrupted():
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_S)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_TERM_S)
    return None


def _last_words(log: Path) -> str:
    try:
        lines = [line for line in last_lines(log, 5) if line.strip()]
    except OSError:
        return ""
    return f": {lines[-1].strip()[:300]} (see {log})" if lines else ""
