"""Local variables: each rank trains its own, and does not exchange their gradients."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

import tensorflow as tf

from tfcluster.runtime.keras.types import Layer, Variable
from tfcluster.runtime.tensor_types import Gradient, Tensor
from tfcluster.runtime.tensor_types import Variable as TfVariable

Source: TypeAlias = Variable | TfVariable | Tensor
"""A Keras or TensorFlow variable, or a tensor that a tape watches."""


class LocalSources:
    """A set of variables; a Keras variable equals its TensorFlow variable.

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
) -> list[Variable]:
    """The trainable weights of one or several layers.

    Raises ValueError if a layer is not built.
    """
    found: list[Variable] = []
    if layers is None:
        return found
    for layer in layers if isinstance(layers, list | tuple) else [layers]:
        if not layer.built:
            raise ValueError(
                f"the layer {layer.name} has no weights yet: build the model before "
                "its local layers are named"
            )
        found += layer.trainable_variables
    return found


def _key(source: Source) -> Hashable:
    value = getattr(source, "value", None)
    inner = source if value is None or callable(value) else value
    return inner.ref() if isinstance(inner, tf.Tensor | tf.Variable) else id(inner)
