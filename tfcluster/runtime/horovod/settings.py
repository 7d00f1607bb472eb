"""Defines how a distributed optimizer or tape exchanges gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from tfcluster.runtime.collective import ReduceOp
from tfcluster.runtime.collective.group import Group
from tfcluster.runtime.exchange.reduce_engine import Exchange, reduce_tensors
from tfcluster.runtime.exchange.wire_format import (
    Compressor,
    Reduction,
    compression_named,
)
from tfcluster.runtime.horovod.local_sources import LocalSources, Source
from tfcluster.runtime.process_group import context, group
from tfcluster.runtime.process_sets import ProcessSet, global_process_set
from tfcluster.runtime.scripts import program_kind
from tfcluster.runtime.telemetry.agent_channel import reporter
from tfcluster.runtime.telemetry.step_rate import StepRate
from tfcluster.runtime.tensor_types import Gradient
from tfcluster.runtime.tensors import name_of

_step_rate: tuple[Group, StepRate] | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """Defines how the gradients of ``label``, an optimizer or a tape, are exchanged."""

    label: str
    reduction: Reduction
    sparse_as_dense: bool = False
    passes: int = 1
    """The number of gradients that each rank sums before one exchange."""
    average_passes: bool = False
    among: ProcessSet = global_process_set
    local: LocalSources = field(default_factory=LocalSources)
    """Variables whose gradients are not exchanged."""

    def exchanged(
        self, gradients: Sequence[Gradient], variables: Sequence[Source]
    ) -> list[Gradient]:
        """Combine gradients (None, tensors or IndexedSlices) over the ranks.

        None stays None. Raises CollectiveMismatchError on all ranks if their gradients
        differ in kind, dtype or shape, or if only some ranks have a gradient for a
        variable.
        """
        chosen = [
            tf.convert_to_tensor(gradient)
            if self.sparse_as_dense and isinstance(gradient, tf.IndexedSlices)
            else gradient
            for gradient in gradients
        ]
        names = [_name(variable, index) for index, variable in enumerate(variables)]
        own = {i for i, v in enumerate(variables) if self.local.has(v)}
        common = [i for i in range(len(chosen)) if i not in own]
        exchange = Exchange(
            f"gradients of {self.label}",
            self.reduction,
            differentiable=False,
            among=self.among,
            done=self._count,
        )
        combined = dict(
            zip(
                common,
                reduce_tensors(
                    exchange, [chosen[i] for i in common], [names[i] for i in common]
                ),
                strict=True,
            )
        )
        return [
            self.local.scaled(gradient, self.among.size()) if i in own else combined[i]
            for i, gradient in enumerate(chosen)
        ]

    def _count(self) -> None:
        """Report a training step to the agent after each exchange."""
        global _step_rate
        ranks = group()
        if _step_rate is None or _step_rate[0] is not ranks:
            _step_rate = ranks, StepRate(reporter(), ranks, tracer=ranks.tracer)
        _step_rate[1].applied(self.label)


def settings(
    label: str,
    *,
    op: ReduceOp | None = None,
    compression: Compressor | None = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Settings:
    """The settings of a program, which now counts as distributing itself.

    Raises ValueError for invalid settings.
    """
    op = op or ReduceOp.AVERAGE
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM):
        raise ValueError(
            f"gradients are combined by Average, Sum or Adasum: op cannot be {op}"
        )
    if gradient_predivide_factor != 1.0 and op is not ReduceOp.AVERAGE:
        raise ValueError("gradient_predivide_factor is for op=Average only")
    if gradient_predivide_factor <= 0:
        raise ValueError("gradient_predivide_factor must be positive")
    if backward_passes_per_step < 1:
        raise ValueError("backward_passes_per_step must be 1 or more")
    program_kind.claim_distribution()
    if compression is None:
        compression = compression_named(context().options.compression)
    reduction = Reduction(
        op, 1.0 / gradient_predivide_factor, gradient_predivide_factor, compression
    )
    return Settings(
        label,
        reduction,
        sparse_as_dense,
        backward_passes_per_step,
        average_aggregated_gradients,
        process_set,
        LocalSources(scale=scale_local_gradients),
    )


def _name(variable: Source, index: int) -> str:
    if hasattr(variable, "path") or hasattr(variable, "name"):
        try:
            return name_of(variable)
        except AttributeError:
            pass  # An eager tensor has no name.
    return f"gradient {index}"
