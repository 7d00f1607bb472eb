"""Translates the errors of TensorFlow's collective ops to CollectiveErrors. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tfcluster.runtime.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    PeerLostError,
)

_REMOTE = re.compile(r"remote target (/job:\w+/replica:\d+/task:\d+)")
_NODES = re.compile(r"\[\[\{\{.*?\}\}\]\] ?|\{\{.*?\}\} ?|\[Op:\w+\]")
"""Where TensorFlow puts the names of ops; users do not know the names of our ops."""
_ABORTED = "Collective ops is aborted by: "
_BEFORE_REASON = ("Graph execution error:", "Detected at node ")
_LEFT = ("UNAVAILABLE", "ABORTED", "CANCELLED", "INTERNAL")


def translated(status: str, text: str, ranks: Sequence[str]) -> CollectiveError:
    """The CollectiveError for a status (``UNAVAILABLE``) and its message.

    ``ranks`` are the task names of all ranks. The first one in the message is the
    origin: tasks that forward an error append their names.
    """
    reason = reason_of(text.partition(_ABORTED)[2] or text)
    if status == "DEADLINE_EXCEEDED":
        return CollectiveTimeoutError(f"a rank did not respond in time: {reason}")
    match = _REMOTE.search(text)
    if status in _LEFT and match and match[1] in ranks:
        return PeerLostError(
            f"rank {ranks.index(match[1])} has left: its process ended or the "
            "connection to it broke"
        )
    if status in _LEFT:
        return PeerLostError(f"a rank has left: {reason}")
    return CollectiveError(f"TensorFlow: {reason}")


def reason_of(text: str) -> str:
    """The line of TensorFlow's message that says what has happened.

    In an error from a graph, the node and the program's lines come before this line.
    """
    lines = [line for line in _NODES.sub("", text).splitlines() if line.strip()]
    for line in lines:
        if not line.startswith((" ", *_BEFORE_REASON)):
            return line.strip()
    return lines[0].strip() if lines else ""


def is_of_exchange(text: str, error: CollectiveError, scope: str) -> bool:
    """Whether a graph's error comes from a collective op, not from the program.

    ``text`` is TensorFlow's message, ``error`` its translation, and ``scope`` the name
    scope of the ops.
    """
    is_lost = isinstance(error, PeerLostError | CollectiveTimeoutError)
    return _ABORTED in text or (is_lost and scope in text)
