"""The words for backends and tasks that all other modules share.

Apart from ``model``, since ``--help`` and ``status`` need nothing else of it.
"""

from __future__ import annotations

from dataclasses import dataclass

RANKED_TYPES = ("chief", "worker")
"""Task types that train together, in rank order: chief, then worker 0, 1, ..."""

TASK_TYPES = (*RANKED_TYPES, "ps", "evaluator", "data")
"""Every task type, in the order in which tasks are listed."""

BUILT_IN_SERVERS = ("ps", "data")
"""Task types that run one of tfcluster's servers instead of the command."""

BACKENDS = ("local", "ssh", "slurm", "sge")


@dataclass(frozen=True, slots=True)
class TaskId:
    """One task: ``worker:0``. The index is counted within the type."""

    type: str
    index: int

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"

    @property
    def ranked(self) -> bool:
        return self.type in RANKED_TYPES

    @property
    def log_name(self) -> str:
        return f"{self.type}-{self.index}.log"

    @classmethod
    def parse(cls, text: str) -> TaskId:
        """The task that ``worker:0`` names. Raises ValueError for any other form."""
        kind, colon, index = text.partition(":")
        if kind not in TASK_TYPES or not colon or not index.isdecimal():
            raise ValueError(f"{text!r} is not TYPE:INDEX")
        return cls(kind, int(index))
