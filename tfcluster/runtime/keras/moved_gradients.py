"""Moves gradients by about their rounding errors, to measure what follows from them.

A sum of floats depends on the order of its terms. Many programs compute the same bits
with any number of threads, so a second run of theirs would show no rounding at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfcluster.runtime.recording_files import devices
from tfcluster.runtime.tensor_types import Gradient, Tensor

_UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The rounding error of one number, relative to its size, if it is not float32's."""
_FLOAT32, _TF32 = 2.0**-24, 2.0**-11
_SUMMING = ("Conv", "Depthwise", "BatchMatMul", "MatMul", "Einsum", "BiasAdd", "Sum")
_CALLS = ("PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile")


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def rounding_unit() -> float:
    """The rounding error of the coarsest sums here, relative to their size.

    "Here" is the graph being traced; outside of one, Keras says how it computes.
    """
    hardware = devices()
    units = {_TF32 if hardware["gpus"] and hardware["tf32"] else _FLOAT32}
    units.add(_UNITS.get(keras.config.dtype_policy().compute_dtype, 0.0))
    inside = tf.inside_function()
    graph: Any = tf.compat.v1.get_default_graph() if inside else None
    while graph is not None:
        for operation in graph.get_operations():
            if operation.type.startswith((*_SUMMING, *_CALLS)):
                units.update(
                    _UNITS.get(one.dtype.name, 0.0) for one in operation.outputs
                )
        graph = getattr(graph, "outer_graph", None)
    return max(units)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def moved_gradients(
    gradients: Sequence[Gradient], unit: float, *, moved: bool
) -> list[Gradient]:
    """``gradients``, each value up or down by about its rounding error if ``moved``.

    ``unit`` is the rounding error of one number, relative to its size.
    A graph gets one operation in either case: the seeds of random operations depend on
    the number of those before them.
    """
    originals = list(gradients)
    flat: list[Any] = tf.nest.flatten(originals, expand_composites=True)
    places = [
        place
        for place, one in enumerate(flat)
        if one is not None and tf.as_dtype(one.dtype).is_floating
    ]
    if not places or not (moved or tf.inside_function()):
        return originals
    tensors = [tf.convert_to_tensor(flat[place]) for place in places]
    results = _moved(tensors, unit) if moved else tf.identity_n(tensors)
    for place, result in zip(places, results, strict=True):
        flat[place] = result
    return tf.nest.pack_sequence_as(originals, flat, expand_composites=True)


@tf.function(autograph=False)  # type: ignore[untyped-decorator]
def _moved(tensors: Sequence[Tensor], unit: float) -> list[Tensor]:
    """See ``moved_gradients``. XLA can compile it, and it has no state."""
    sizes = [_size(tensor) for tensor in tensors]
    largest = tf.reduce_max(tf.stack(sizes))
    # Each step has other gradients, and so other signs.
    sums = [tf.reduce_sum(tf.abs(tf.cast(one, tf.float32))) for one in tensors]
    seed = tf.bitcast(tf.add_n(sums), tf.int32)
    moved: list[Tensor] = []
    for place, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        bits = tf.random.stateless_uniform(
            tf.shape(tensor), [seed, place], 0, 2, tf.int32
        )
        wide = tf.float64 if tensor.dtype == tf.float64 else tf.float32
        # The gradient of a weight without influence, such as a bias before a
        # BatchNormalization, is the rounding error of numbers as large as others.
        step = tf.cast((size + largest) * unit, wide)
        result = tf.cast(tensor, wide) + step * tf.cast(2 * bits - 1, wide)
        moved.append(tf.ensure_shape(tf.cast(result, tensor.dtype), tensor.shape))
    return moved


def _size(tensor: Tensor) -> Tensor:
    """The largest absolute value; 0 if a gradient has overflowed, or is empty."""
    size: Tensor = tf.reduce_max(tf.abs(tf.cast(tensor, tf.float32)))
    return tf.where(tf.math.is_finite(size), size, 0.0)
