"""Claims the task's rank for this process: one process of a task trains at a time.

A task's command may be a script that starts Python, and a program may train in a child
process. The first process that is about to connect to other ranks gets the rank from
the agent; a second process at the same time is an error. The module knows nothing about
connections to ranks.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass

from tfcluster.protocol import local
from tfcluster.protocol.frames import encode
from tfcluster.protocol.wire import Decoder, WireError
from tfcluster.runtime.errors import CollectiveError
from tfcluster.runtime.telemetry.agent_channel import reporter

ADDRESS = "TFCLUSTER_EVENTS_SOCKET"
"""The variable with the name of the agent's abstract Unix socket for this task."""

_COMMAND_CHARS = 120
_PATIENCE_S = 60.0
"""An agent answers at once; a stopped agent must not block the program forever."""


@dataclass(frozen=True, slots=True)
class Claim:
    """This process's claim of the rank, which ``number`` processes had before."""

    number: int
    before: str = ""
    """A description of the last of these processes."""
    line: socket.socket | None = None
    """The connection to the agent; the rank is taken as long as it is open."""


_claim: Claim | None = None


def agent_answers() -> bool:
    """Whether there is an agent from which processes claim ranks."""
    return bool(os.environ.get(ADDRESS))


def claim(task: str) -> Claim:
    """Claim the rank of ``task`` for this process, until it ends.

    Raises CollectiveError if another process of the task has it.
    """
    global _claim
    if _claim is None:
        address = os.environ.get(ADDRESS)
        _claim = _ask(address, task) if address else Claim(0)
    return _claim


def require_first(task: str, what: str) -> None:
    """Claim the rank in a case where only one process per attempt may ever have it.

    ``what`` gives the reason. Raises CollectiveError if another process has or had it.
    """
    claimed = claim(task)
    if claimed.number:
        raise CollectiveError(
            f"{_this_process()} trains, but {claimed.before} of {task} has trained "
            f"before it: {what}. Train both in one process, or in separate runs"
        )


def _ask(address: str, task: str) -> Claim:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.settimeout(_PATIENCE_S)
        line.connect(f"\0{address}")
        line.sendall(encode(local.ClaimRequest(_command())))
        answer = _answer(line)
        line.settimeout(None)
    except (OSError, WireError) as error:
        line.close()
        # Most likely this is a container with a separate network namespace. The other
        # ranks may still be reachable.
        sys.stderr.write(
            f"tfcluster: warning: {_this_process()} cannot reach its agent ({error}): "
            "its steps are not shown, and its collectives are not reported\n"
        )
        return Claim(0)
    other = f"process {answer.pid} ({answer.command})"
    if answer.taken:
        line.close()
        raise CollectiveError(
            f"{_this_process()} cannot train: {other}, another process of {task}, is "
            "already training, and only one process at a time can have a task's rank. "
            "Start one task for each training process, or train in only one of them"
        )
    reporter().adopt(line)
    return Claim(answer.number, other, line)


def _answer(line: socket.socket) -> local.Claimed:
    frames = Decoder()
    while data := line.recv(4096):
        for frame in frames.feed(data):
            return local.decode_claimed(frame)
    raise OSError("connection closed")


def _this_process() -> str:
    return f"process {os.getpid()} ({_command()})"


def _command() -> str:
    return " ".join(" ".join(sys.orig_argv).split())[:_COMMAND_CHARS]


def _not_in_child() -> None:
    """Drop the claim in a forked child, which does not have the rank."""
    global _claim
    if _claim is not None and _claim.line is not None:
        _claim.line.close()
    _claim = None


os.register_at_fork(after_in_child=_not_in_child)
