"""The states of runs and tasks, in the order in which they occur.

The words are part of the contract (``status --json``). A state never moves backwards
within one attempt; a restart begins a new attempt, at ``pending``.
"""

from __future__ import annotations

from enum import Enum

_FINAL = frozenset({"succeeded", "failed", "stopped", "lost"})


class _Ordered(str, Enum):
    """A state is its word; the final states come last."""

    final: bool
    """Whether no other state follows."""
    order: int
    """The position in the sequence; all final states share the last one."""

    def __init__(self, word: object) -> None:
        # Attributes, because status compares the states of thousands of events.
        earlier = type(self).__members__.values()
        self.final = word in _FINAL
        self.order = sum(not state.final for state in earlier)

    def __str__(self) -> str:
        return str(self.value)


class RunState(_Ordered):
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"


class TaskState(_Ordered):
    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"
