"""Names the probable cause of a difference. Pure.

The order is by certainty: an error or a warning of the runtime, a program that differs
from itself, the arithmetic of the difference, and finally a layer that is known to
compute something else on several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfcluster.plan.model import Runtime, Strategy
from tfcluster.verify.compare import Difference
from tfcluster.verify.recorded import Recorded

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
        f"({at}). Give its random generators fixed seeds "
        "(numpy.random.default_rng(7), not default_rng())"
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
