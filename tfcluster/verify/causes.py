"""Names the probable cause of a difference. Pure.

The order is that of certainty: an error or a warning of the runtime, a program that
differs from itself, the arithmetic of the difference, and last a layer that is known to
compute something else on several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfcluster.model import Runtime, Strategy
from tfcluster.verify.compare import Difference
from tfcluster.verify.recorded import Recorded

_RANDOM = {
    "AlphaDropout",
    "Dropout",
    "GaussianDropout",
    "GaussianNoise",
    "SpatialDropout1D",
    "SpatialDropout2D",
    "SpatialDropout3D",
}
_CLOSE = 1e-3


def own_difference(again: Difference | None, found: Difference) -> str | None:
    """The cause, if two runs of one process differ no later than the ranks do."""
    # What is compared at the end of the program comes after all of its steps.
    end = float("inf")
    if again is None or (again.step if again.step >= 0 else end) > (
        found.step if found.step >= 0 else end
    ):
        return None
    return (
        "the program is not deterministic: two runs of it in one process differ, too "
        f"({again.kind} {again.name} after step {again.step}). Give its random "
        "generators fixed seeds (numpy.random.default_rng(7), not default_rng())"
    )


def causes(
    found: Difference,
    alone: Recorded,
    size: int,
    runtime: Runtime,
    warnings: Sequence[str],
) -> list[str]:
    """Sentences that explain the difference, the most probable one first."""
    said = list(warnings)
    if (method := _of_method(runtime)) is not None:
        return [*said, method]
    if found.kind == "printed":
        said.append(
            "a number that the program computes from its batch covers only that rank's "
            "rows; the loss printed by the chief's loop is that of the chief's rows "
            "(tfc.allreduce averages it over the ranks)"
        )
    if found.kind == "learning_rate":
        said.append(
            "the program sets the learning rate by its rank or by the number of ranks: "
            "tfcluster keeps the global batch size, so do not scale the learning rate"
        )
    factor = found.factor
    if factor is not None and abs(factor - 1) > _CLOSE:
        said.append(_of_factor(factor, size))
    elif alone.clips and found.kind in ("weight", "slot"):
        said.append(
            "gradients may have been clipped before the optimizer saw them: "
            + ", ".join(alone.clips)
        )
    if found.kind in ("weight", "slot", "logs", "state"):
        said += _of_layers(alone, runtime)
    return said


def _of_method(runtime: Runtime) -> str | None:
    """What a strategy changes by itself; None if it promises an equal result."""
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


def _of_factor(factor: float, size: int) -> str:
    words = f"the update of the weights is {factor:.4g} times that of one process"
    if abs(factor - size) < _CLOSE * size:
        return f"{words}, the number of ranks: the loss is a sum over rows, not a mean"
    if abs(factor * size - 1) < _CLOSE:
        return f"{words}, one over the number of ranks: the loss is divided twice"
    return words


def _of_layers(alone: Recorded, runtime: Runtime) -> list[str]:
    said = []
    if drawing := sorted(alone.layers & _RANDOM | _augmenting(alone.layers)):
        said.append(
            f"{', '.join(drawing)} draw random numbers: results are equal only if the "
            "ranks divide the batch by rows, and if the seeds do not depend on the rank"
        )
    local = runtime.batch_normalization == "local"
    if "BatchNormalization" in alone.layers and local:
        said.append(
            "BatchNormalization: with runtime.batch_normalization: local, each rank "
            "normalises by its own rows"
        )
    return said


def _augmenting(layers: frozenset[str]) -> set[str]:
    return {name for name in layers if name.startswith("Random")}
