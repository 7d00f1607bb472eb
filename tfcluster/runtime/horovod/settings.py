"""Defines how a distributed optimizer or tape exchanges gradients."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import tensorflow as tf

from tfcluster.runtime.collective import ReduceOp
from tfcluster.runtime.collective.group import Group
from tfcluster.runtime.exchange.reduce_engine import Exchange, reduce_tensors
from tfcluster.runtime.exchange.wire_format import (
    Compressor,
    Reduction,
    compression_named,
)
from tfcluster.runtime.keras.types import KerasVariable, Layer
from tfcluster.runtime.process_group import context, group
from tfcluster.runtime.process_sets import ProcessSet, global_process_set
from tfcluster.runtime.scripts import program_kind
from tfcluster.runtime.telemetry.agent_channel import reporter
from tfcluster.runtime.telemetry.step_rate import StepRate
from tfcluster.runtime.tensor_types import Gradient, Tensor
from tfcluster.runtime.tensor_types import Variable as TfVariable
from tfcluster.runtime.tensors import name_of

Source: TypeAlias = KerasVariable | TfVariable | Tensor
"""A Keras or TensorFlow variable, or a tensor that a tape watches."""


class LocalSources:
    """Variables that each rank trains by itself: their gradients are not exchanged.

    A Keras variable equals its TensorFlow variable.

    With ``scale``, their gradients are divided by the number of ranks, as if the other
    ranks' gradients were zero.
    """

    def __init__(self, *, scale: bool = True) -> None:
        self._scale = scale
        self._known: dict[Hashable, Source] = {}

    def add(self, source: Source) -> None:
        """Make ``source`` a local variable."""
        self._known[_key(source)] = source

    def has(self, source: Source) -> bool:
        """Whether ``source`` is a local variable."""
        return bool(self._known) and _key(source) in self._known

    def scaled(self, gradient: Gradient, size: int) -> Gradient:
        """The gradient of a local variable as it should be applied.

        ``size`` is the number of ranks. Shape, dtype and kind stay.
        """
        if gradient is None or not self._scale or size == 1:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            values = self.scaled(gradient.values, size)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(size, gradient.dtype)


def weights_of(
    layers: Layer | list[Layer] | tuple[Layer, ...] | None,
) -> list[KerasVariable]:
    """The trainable weights of one or several layers.

    Raises ValueError if a layer is not built.
    """
    weights: list[KerasVariable] = []
    if layers is None:
        return weights
    for layer in layers if isinstance(layers, list | tuple) else [layers]:
        if not layer.built:
            raise ValueError(
                f"the layer {layer.name} has no weights yet: build the model before "
                "its local layers are named"
            )
        weights += layer.trainable_variables
    return weights


def _key(source: Source) -> Hashable:
    value = getattr(source, "value", None)
    inner = source if value is None or callable(value) else value
    return inner.ref() if isinstance(inner, tf.Tensor | tf.Variable) else id(inner)


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
        self,
        gradients: Sequence[Gradient],
        variables: Sequence[Source],
        *,
        by_position: bool = False,
    ) -> list[Gradient]:
        """Combine gradients (None, tensors or IndexedSlices) over the ranks.

        None stays None. A rank outside of ``among`` keeps its gradients. With
        ``by_position``, variables may have other names on other ranks. Raises
        CollectiveMismatchError on all ranks if their gradients differ in kind, dtype or
        shape, or if only some ranks have a gradient for a variable.
        """
        chosen = [
            tf.convert_to_tensor(gradient)
            if self.sparse_as_dense and isinstance(gradient, tf.IndexedSlices)
            else gradient
            for gradient in gradients
        ]
        names = [
            _name(index if by_position else variable, index)
            for index, variable in enumerate(variables)
        ]
        own = {i for i, v in enumerate(variables) if self.local.has(v)}
        if not self.among.included():
            return [
                self.local.scaled(gradient, self.among.size()) if i in own else gradient
                for i, gradient in enumerate(chosen)
            ]
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


def _name(variable: Source | int, index: int) -> str:
    if hasattr(variable, "path") or hasattr(variable, "name"):
        try:
            return name_of(variable)
        except AttributeError:
            pass  # An eager tensor has no name.
    return f"gradient {index}"
