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
_NODES = re.compile(r"\{\{.*?\}\}|\[Op:\w+\]")
"""Where TensorFlow puts the names of ops: ours mean nothing to anybody."""
_ABORTED = "Collective ops is aborted by: "
_LEFT = ("UNAVAILABLE", "ABORTED", "CANCELLED", "INTERNAL")


def translated(status: str, text: str, ranks: Sequence[str]) -> CollectiveError:
    """The CollectiveError for a status (``UNAVAILABLE``) and its message.

    ``ranks`` are the task names of all ranks. The first one in the message is the
    origin: tasks that forward an error append their names.
    """
    reason = _NODES.sub("", text).strip().partition("\n")[0].rstrip()
    reason = reason.removeprefix(_ABORTED)
    if status == "DEADLINE_EXCEEDED":
        return CollectiveTimeoutError(f"a rank did not respond in time: {reason}")
    found = _REMOTE.search(text)
    if status in _LEFT and found and found[1] in ranks:
        return PeerLostError(
            f"rank {ranks.index(found[1])} has left: its process ended or the "
            "connection to it broke"
        )
    if status in _LEFT:
        return PeerLostError(f"a rank has left: {reason}")
    return CollectiveError(f"TensorFlow: {reason}")
