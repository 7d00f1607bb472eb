"""The answer of ``tfcluster verify`` as plain data, and as JSON."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, cast

from tfcluster.base.vocabulary import FORMAT_VERSION
from tfcluster.plan.model import Strategy
from tfcluster.verify.compare import Comparison, Difference
from tfcluster.verify.noise import Tolerance

if TYPE_CHECKING:
    from tfcluster.documents import checks as documents


_REFUSAL = re.compile(r"(?:\w+\.)*CollectiveError: ")


@dataclass(frozen=True, slots=True)
class TrialFailure:
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
    """A task's failure: its recorded cause and its log without ``folder``."""
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


def as_json(verdict: Verdict) -> documents.Verification:
    comparison, first = verdict.comparison, verdict.first
    return {
        "schema": FORMAT_VERSION,
        "equal": verdict.equal,
        "ranks": verdict.size,
        "strategy": str(verdict.strategy),
        "of_noise": _finite(comparison.of_noise) if comparison else None,
        "tolerance": verdict.tolerance.value if verdict.tolerance else None,
        "tolerance_reason": verdict.tolerance.why if verdict.tolerance else None,
        "compared_with": verdict.baseline or "one process",
        "by_chance": verdict.by_chance,
        "not_compared": list(verdict.not_compared),
        "steps": comparison.steps if comparison else 0,
        "to_the_end": verdict.complete,
        "largest_difference": _finite(comparison.largest) if comparison else None,
        "compared": {
            quantity.kind: {
                "values": quantity.compared,
                "largest": _finite(quantity.largest),
                "of_noise": _finite(quantity.of_noise),
            }
            for quantity in (comparison.quantities if comparison else ())
        },
        "first_difference": None if first is None else _difference(first),
        "causes": list(verdict.causes),
        "failed_alone": _failure(verdict.failed_alone),
        "failed_on_ranks": _failure(verdict.failed_on_ranks),
    }


def _failure(failure: TrialFailure | None) -> documents.FailedTrial | None:
    if failure is None:
        return None
    entries = asdict(failure) | {"tail": list(failure.tail)}
    return cast("documents.FailedTrial", entries)


def _difference(first: Difference) -> documents.FirstDifference:
    entries = {
        key: _finite(value) if isinstance(value, float) else value
        for key, value in asdict(first).items()
    }
    return cast("documents.FirstDifference", entries | {"text": first.words()})


def _finite(value: float | None) -> float | None:
    """The value, or None if it is not finite, which JSON cannot express."""
    return value if value is not None and math.isfinite(value) else None
