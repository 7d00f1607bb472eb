"""The process that drives a run for a Python program.

It reads what to launch as JSON from standard input, and answers with one line of JSON
on a pipe once there is a run or an error. It ends the run if the program is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from tfcluster.api.launcher_child import error_to_plain
from tfcluster.base.errors import TfclusterError
from tfcluster.commands.launch import launch_described, submits_to
from tfcluster.launcher.detach import leave_terminal
from tfcluster.plan.description_json import from_plain
from tfcluster.plan.model import Description
from tfcluster.record.crash import crashed
from tfcluster.record.files import write_all
from tfcluster.record.paths import RunPaths


def main(argv: Sequence[str]) -> int:
    """Launch and return the run's exit code. ``argv`` has the pipe's descriptor."""
    _hear_signals()
    answer = _Answer(int(argv[0]))
    asked: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    parent, detach = int(asked["parent"]), bool(asked["detach"])
    if not detach:
        _end_with(parent)

    def begun(paths: RunPaths) -> None:
        leave_terminal(paths)
        answer.say({"run": paths.run})

    try:
        description = from_plain(Description, asked["description"])
        # This process has left its terminal and keeps running: only a job still needs
        # to be detached.
        detach = detach and submits_to(description, os.environ) is not None
        return launch_described(description, os.environ, detach=detach, begun=begun)
    except TfclusterError as error:
        return answer.refuse(error)
    except Exception as error:
        return answer.refuse(crashed(error, os.environ))
    finally:
        if asked["scratch"] is not None and os.getppid() != parent:
            shutil.rmtree(asked["scratch"], ignore_errors=True)


def _hear_signals() -> None:
    """Receive the signals that stop a run: the program may ignore or block them, which
    its children inherit."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


class _Answer:
    """The pipe to the program, for a single line."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        os.set_inheritable(descriptor, False)

    def say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the program is gone
            write_all(self._descriptor, json.dumps(message).encode() + b"\n")
        os.close(self._descriptor)
        self._descriptor = -1

    def refuse(self, error: TfclusterError) -> int:
        if self._descriptor >= 0:
            self.say({"error": error_to_plain(error)})
        else:
            print(*error.lines(), sep="\n", file=sys.stderr)  # noqa: T201 - to the log
        return int(error.exit_code)


def _end_with(parent: int) -> None:
    """Get SIGTERM once the program is gone, however it ended.

    Unlike prctl(PR_SET_PDEATHSIG), a pidfd does not depend on the thread that started
    us, and unlike a pipe, no child of the program can keep it open.
    """
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
