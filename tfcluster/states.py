"""The states of runs and tasks, in the order in which they occur.

The words are part of the contract (``status --json``). A state never moves backwards
within one attempt; a restart begins a new attempt, at ``pending``.
"""

from __future__ import annotations

from enum import Enum


class _Ordered(str, Enum):
    """A state is its word; no other state follows one that is ``final``."""

    @property
    def final(self) -> bool:
        return self.value in {"succeeded", "failed", "stopped", "lost"}

    @property
    def order(self) -> int:
        """Position in the sequence; all final states share the last one."""
        words = [member.value for member in type(self) if not member.final]
        return len(words) if self.final else words.index(self.value)

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
