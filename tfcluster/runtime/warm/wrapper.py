"""Checks whether tasks can be forked in an interpreter that a wrapper has started.

A wrapper is a command like ``apptainer exec image python``. It must pass on the socket
to the agent, and forked tasks must become children of the agent.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
import time
from contextlib import suppress
from typing import NoReturn

from tfcluster.protocol.wire import BLAMES_WRAPPER, UNFORKABLE, UNUSABLE
from tfcluster.runtime.task.bootstrap import lost_variables

_ORPHANED_S = 5.0
_LOOK_S = 0.002


def below_wrapper(number: int, agent: int) -> socket.socket:
    """The socket to the agent, whose pid is ``agent``.

    It is the standard input, or the descriptor ``number``. If the interpreter cannot
    work below its wrapper, says why and exits with a code of ``BLAMES_WRAPPER``.
    """
    if problem := lost_variables(os.environ):
        _give_up(problem, UNUSABLE)
    descriptor = next((fd for fd in (0, number) if _is_socket(fd)), None)
    if descriptor is None:
        _give_up("the command of 'python' replaces its standard input", UNFORKABLE)
    if _adopter() != agent:
        _give_up(
            "the command of 'python' hides its processes from the host (options like "
            "--pid, --containall, --unshare-pid), or adopts those that it starts",
            UNFORKABLE,
        )
    end = socket.socket(fileno=os.dup(descriptor))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if descriptor:
        os.close(descriptor)
    return end


def _is_socket(descriptor: int) -> bool:
    with suppress(OSError):
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    return False


def _give_up(why: str, kind: str) -> NoReturn:
    sys.stderr.write(f"tfcluster: {why}\n")
    sys.exit(next(code for code, name in BLAMES_WRAPPER.items() if name == kind))


def _adopter() -> int:
    """The pid of the process that becomes the parent of our orphans."""
    answer, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        between = os.getpid()
        if os.fork():
            os._exit(0)
        deadline = time.monotonic() + _ORPHANED_S
        while os.getppid() == between and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        os.write(writer, str(os.getppid()).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(middle, 0)
    with os.fdopen(answer, "rb") as stream:
        return int(stream.read() or b"0")
