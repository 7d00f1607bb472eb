"""The answer of ``tfcluster verify`` as JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

from tfcluster.verify.compare import Difference
from tfcluster.verify.verdict import TrialFailure, Verdict
from tfcluster.vocabulary import FORMAT_VERSION

if TYPE_CHECKING:
    from tfcluster.documents import verify as documents


def as_json(verdict: Verdict) -> documents.Verification:
    """The document of a verdict."""
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
            each.kind: {
                "values": each.compared,
                "largest": _finite(each.largest),
                "of_noise": _finite(each.of_noise),
            }
            for each in (comparison.quantities if comparison else ())
        },
        "first_difference": None if first is None else _difference(first),
        "causes": list(verdict.causes),
        "failed_alone": _failure(verdict.failed_alone),
        "failed_on_ranks": _failure(verdict.failed_on_ranks),
    }


def _failure(failure: TrialFailure | None) -> documents.FailedTrial | None:
    if failure is None:
        return None
    return {
        "reason": failure.reason,
        "tail": list(failure.tail),
        "refused": failure.refused,
        "task": failure.task,
        "hint": failure.hint,
    }


def _difference(first: Difference) -> documents.FirstDifference:
    return {
        "step": first.step,
        "kind": cast("documents.QuantityKind", first.kind),
        "name": first.name,
        "alone": _finite(first.alone),
        "ranks": _finite(first.ranks),
        "relative": _finite(first.relative),
        "of_noise": _finite(first.of_noise),
        "factor": _finite(first.factor),
        "text": first.words(),
    }


def _finite(value: float | None) -> float | None:
    """The value, or None if it is not finite, which JSON cannot express."""
    return value if value is not None and math.isfinite(value) else None
