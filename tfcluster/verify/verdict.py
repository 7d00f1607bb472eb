"""The answer of ``tfcluster verify`` as plain data."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tfcluster.model import Strategy
from tfcluster.verify.compare import Comparison, Difference
from tfcluster.verify.tolerance import Tolerance

_REFUSAL = re.compile(r"(?:\w+\.)*CollectiveError: ")


@dataclass(frozen=True, slots=True)
class TrialFailure:
    """Why a run of the program failed."""

    reason: str
    tail: tuple[str, ...]
    """The last lines of the task."""
    refused: bool = False
    """Whether tfcluster ended it because its result would have differed."""
    task: str = ""
    """The task that failed first, such as ``worker:1``."""
    hint: str = ""


def failure(
    cause: str, tail: tuple[str, ...], *, folder: str = "", task: str = ""
) -> TrialFailure:
    """The failure of a task, from the cause in the record and the end of its log.

    ``folder`` is the copy that it ran in, which will be removed.
    """
    if folder:
        tail = tuple(line.replace(f"{folder}/", "") for line in tail)
        cause = cause.replace(f"{folder}/", "")
    # The record may cut a long cause; the log has all of it.
    whole = [line.strip() for line in tail if line.strip().startswith(cause)]
    reason = whole[-1] if whole else cause
    if _REFUSAL.match(reason):
        return TrialFailure(_REFUSAL.sub("", reason), (), refused=True, task=task)
    return TrialFailure(reason, tail, task=task)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer."""

    size: int
    strategy: Strategy
    comparison: Comparison | None = None
    """None if one of the runs failed."""
    first: Difference | None = None
    complete: bool = False
    """Whether the program ran to its end in both trials."""
    causes: tuple[str, ...] = ()
    failed_alone: TrialFailure | None = None
    failed_on_ranks: TrialFailure | None = None
    tolerance: Tolerance | None = None
    """None if one of the runs failed."""
    baseline: str = ""
    """What the ranks are compared with if it is not one process."""
    by_chance: str | None = None
    """Why another run may differ although this one is equal."""
    not_compared: tuple[str, ...] = ()
    """What could not be recorded, in words."""

    @property
    def equal(self) -> bool:
        return self.comparison is not None and self.first is None
