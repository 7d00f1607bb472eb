"""The process that drives a run for a Python program, and ends it with the program.

It reads what to launch as JSON from standard input, and answers with a line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from typing import Any

from tfcluster.base.errors import TfclusterError
from tfcluster.commands.launch import launch_described, submits_to
from tfcluster.launcher.detach import end_with, error_to_plain, leave_terminal
from tfcluster.plan.description_json import from_plain
from tfcluster.plan.model import Description
from tfcluster.record.crash import crashed
from tfcluster.record.paths import RunPaths


def main(_argv: Sequence[str]) -> int:
    """Launch and return the run's exit code."""
    _hear_signals()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    parent, detach = int(request["parent"]), bool(request["detach"])
    if not detach:
        end_with(parent)

    def send(message: dict[str, Any]) -> None:
        """Send the one line of the answer; the program may be gone."""
        with contextlib.suppress(OSError), answers:
            answers.write(f"{json.dumps(message)}\n")

    def begun(paths: RunPaths) -> None:
        leave_terminal(paths)
        send({"run": paths.run})

    try:
        description = from_plain(Description, request["description"])
        # This process has left its terminal and keeps running: only a job still needs
        # to be detached.
        detach = detach and submits_to(description, os.environ) is not None
        return launch_described(description, os.environ, detach=detach, begun=begun)
    except Exception as caught:
        error = caught
        if not isinstance(error, TfclusterError):
            error = crashed(error, os.environ)
        if answers.closed:
            print(*error.lines(), sep="\n", file=sys.stderr)  # noqa: T201 - to the log
        else:
            send({"error": error_to_plain(error)})
        return int(error.exit_code)
    finally:
        if request["scratch"] is not None and os.getppid() != parent:
            shutil.rmtree(request["scratch"], ignore_errors=True)


def _hear_signals() -> None:
    """Receive the signals that stop a run: the program may ignore or block them."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
