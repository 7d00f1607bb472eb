"""Variables that each rank trains by itself, beside those that all train together."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class LocalSources:
    """Known by what TensorFlow keeps of them: a Keras variable is the same as its own.

    ``scale`` divides their gradients by the number of ranks, as if the others had none.
    """

    def __init__(self, *, scale: bool = True) -> None:
        self._scale = scale
        self._known: dict[Any, Any] = {}

    def add(self, source: Any) -> None:
        self._known[_key(source)] = source

    def has(self, source: Any) -> bool:
        return bool(self._known) and _key(source) in self._known

    def scaled(self, gradient: Any, size: int) -> Any:
        """The gradient of a local source, as it is applied."""
        if gradient is None or not self._scale or size == 1:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            values = self.scaled(gradient.values, size)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(size, gradient.dtype)


def weights_of(layers: Any) -> list[Any]:
    """The trainable weights of a layer, or of several.

    Raises ValueError for a layer that has none yet.
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
