"""Local variables: each rank trains its own, and their gradients are not exchanged."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfcluster.runtime.tensor_types import Gradient


class LocalSources:
    """A set of variables. A Keras variable and its TensorFlow variable are the same.

    With ``scale``, their gradients are divided by the number of ranks, as if the other
    ranks' gradients were zero.
    """

    def __init__(self, *, scale: bool = True) -> None:
        self._scale = scale
        self._known: dict[Any, Any] = {}

    def add(self, source: Any) -> None:
        """Make ``source`` a local variable."""
        self._known[_key(source)] = source

    def has(self, source: Any) -> bool:
        """Whether ``source`` is a local variable."""
        return bool(self._known) and _key(source) in self._known

    def scaled(self, gradient: Gradient, size: int) -> Any:
        """The gradient of a local variable as it is to be applied."""
        if gradient is None or not self._scale or size == 1:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            values = self.scaled(gradient.values, size)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(size, gradient.dtype)


def weights_of(layers: Any) -> list[Any]:
    """The trainable weights of one layer or of several.

    Raises ValueError if a layer is not built.
    """
    chosen = [] if layers is None else layers
    found = []
    for layer in chosen if isinstance(chosen, list | tuple) else [chosen]:
        if not layer.built:
            raise ValueError(
                f"the layer {layer.name} has no weights yet: build the model before "
                "its local layers are named"
            )
        found += layer.trainable_variables
    return found


def _key(source: Any) -> Any:
    value = getattr(source, "value", None)
    inner = source if value is None or callable(value) else value
    return inner.ref() if isinstance(inner, tf.Tensor | tf.Variable) else id(inner)
