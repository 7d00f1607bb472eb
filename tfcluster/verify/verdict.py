"""The answer of ``tfcluster verify``, as JSON, too, and probable causes. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, cast

from tfcluster.base.vocabulary import FORMAT_VERSION
from tfcluster.plan.model import Runtime, Strategy
from tfcluster.verify.compare import Comparison, Difference
from tfcluster.verify.noise import Tolerance
from tfcluster.verify.recorded import Recorded

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


_RANDOM = {
    *("Dropout", "AlphaDropout", "GaussianDropout", "GaussianNoise"),
    *("SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D"),
}
_CLOSE = 1e-3
_WHERE = {
    "course": "in the order of their steps",
    "file": "in the files that they write",
    "learning_rate": "in the learning rate",
    "printed": "in what they print",
}
_SYNC_REPLICAS = (
    "SyncReplicasOptimizer averages the gradients that arrive first: of a fast worker "
    "it may take two and of a slow one none, so the result may differ by design"
)


def own_difference(again: Difference | None, first: Difference) -> str | None:
    """The cause, if two runs of one process differ no later than the ranks do."""
    # What is compared at the program's end comes after all steps.
    if again is None or (again.at_the_end, again.step) > (first.at_the_end, first.step):
        return None
    name = again.name if again.kind == "logs" else f"{again.kind} {again.name}"
    at = _WHERE.get(again.kind, f"{name} after step {again.step}")
    return (
        f"the program is not deterministic: two runs of it in one process differ, too "
        f"({at}). Let nothing that it trains depend on a clock, os.urandom or the "
        "order in which threads end"
    )


def causes(
    first: Difference,
    ranks: Recorded,
    size: int,
    runtime: Runtime,
    warnings: Sequence[str],
) -> list[str]:
    """Sentences that explain the difference, the most probable one first."""
    reasons = list(warnings)
    if (method := of_method(runtime, ranks, size)) is not None:
        return [*reasons, method]
    if first.kind == "run":
        reasons.append(
            "a number that a session returns covers only that worker's rows; after "
            "each step, the weights are equal"
        )
    if "sync_replicas" in ranks.methods:
        reasons.append(_SYNC_REPLICAS)
    if first.kind == "learning_rate":
        reasons.append(
            "the program sets the learning rate by its rank or by the number of ranks: "
            "tfcluster keeps the global batch size, so do not scale the learning rate"
        )
    factor, is_certain = first.factor, False
    if factor is not None and abs(factor - 1) > _CLOSE:
        words, is_certain = _of_factor(factor, size)
        reasons.append(words)
    if ranks.clips and not is_certain and first.kind in ("weight", "slot"):
        reasons.append(
            "gradients may have been clipped before the optimizer saw them: "
            + ", ".join(ranks.clips)
        )
    if first.kind in ("weight", "slot", "logs", "state"):
        reasons += _of_layers(ranks)
    return reasons


def of_method(runtime: Runtime, ranks: Recorded, size: int) -> str | None:
    """What a strategy changes by design; None if it promises equal results."""
    if size == 1:
        return None
    if ranks.methods:
        served = runtime.strategy in (Strategy.PARAMETER_SERVER, Strategy.REPLICATED)
        if not served or "independent" not in ranks.methods:
            return None
        return (
            "the graph of TensorFlow 1 applies each worker's gradient as it arrives, "
            "so the result differs by design (SyncReplicasOptimizer or mean=True "
            "averages the workers' gradients)"
        )
    if runtime.strategy is Strategy.LOCAL_SGD:
        return (
            "local_sgd: each rank makes steps of its own between two averagings, so "
            "the result differs by design"
        )
    if runtime.strategy is Strategy.PARAMETER_SERVER and not runtime.synchronous:
        return (
            "parameter_server without runtime.synchronous: ranks do not wait for each "
            "other, so the result differs by design"
        )
    if not runtime.divides:
        return (
            "every rank trains on whole batches (runtime.batch or runtime.data), so "
            "the result differs by design"
        )
    return None


def _of_factor(factor: float, size: int) -> tuple[str, bool]:
    """What a constant factor between the updates means, and whether that is certain."""
    words = f"the update of the weights is {factor:.4g} times that of one process"
    if abs(factor - size) < _CLOSE * size:
        added = "the number of ranks: the program adds gradients up, without a mean"
        return f"{words}, {added}", True
    if abs(factor * size - 1) < _CLOSE:
        twice = "one over the number of ranks: the program averages gradients twice"
        return f"{words}, {twice}", True
    return words, False


def _of_layers(ranks: Recorded) -> list[str]:
    drawing = [
        layer
        for layer in sorted(ranks.layers)
        if layer in _RANDOM or layer.startswith("Random")
    ]
    if not drawing:
        return []
    return [
        f"{', '.join(drawing)} draw random numbers: a program that divides its data "
        "itself draws the same numbers for other rows"
    ]
