"""The names of single tasks.

Separate from ``vocabulary``, because ``--help`` needs no tasks, and a dataclass takes
time.
"""

from __future__ import annotations

from tfcluster.base.light_dataclasses import dataclass
from tfcluster.base.vocabulary import RANKED_TYPES, TASK_TYPES


@dataclass(frozen=True, slots=True)
class TaskId:
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
