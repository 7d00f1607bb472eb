"""Batches of the ranks' own, with ``batch: per_worker``: their order and their size.

Each rank may shuffle the data in its own order, instead of dividing a common order. The
rank is added to TensorFlow's global seed, on which shuffles by ``tf.data`` and of
Keras's arrays depend. All ranks keep the same Python and NumPy seeds: scripts use them,
for example, to hold out validation data, which must be the same everywhere. Initial
weights must also be the same, but these are broadcast anyway.

A step that was traced for the rows of one rank's batch is to compute those of all
ranks: no constant of the step may come from their number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime import tf_patches
from tfcluster.runtime.contract import HandlerPlace
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.types import EpochIterator
from tfcluster.runtime.tensor_types import Dataset, Tensor


def allow_any_rows() -> None:
    """Install the hooks for steps of any number of rows, once per process."""
    patches.TABLE.install({patches.EPOCH_ITERATOR: _begin}, HandlerPlace.LAST)
    tf_patches.TABLE.install({tf_patches.TRACE: _trace})


def _begin(
    original: Callable[..., None], iterator: EpochIterator, *args: Any, **kwargs: Any
) -> None:
    original(iterator, *args, **kwargs)
    dataset = internals.dataset_of(iterator)
    if any(map(_is_known, tf.nest.flatten(dataset.element_spec))):
        internals.set_dataset(iterator, of_any_rows(dataset))


def _trace(
    original: Callable[..., Any],
    function_type: Any,
    context: Any,
    graph: Any,
    options: Any,
) -> Any:
    """Trace a function that the program calls for arguments of any number of rows."""
    if tf.executing_eagerly() and options.input_signature is None:
        parameters = [
            type(parameter)(
                parameter.name,
                parameter.kind,
                parameter.optional,
                _relaxed_type(parameter.type_constraint),
            )
            for parameter in function_type.parameters.values()
        ]
        relaxed = type(function_type)(parameters, function_type.captures)
        if relaxed != function_type:
            # A function that needs to know the number is traced for that number.
            with contextlib.suppress(Exception):
                return original(relaxed, context, type(graph)(graph.name), options)
    return original(function_type, context, graph, options)


def _relaxed_type(kind: Any) -> Any:
    """The type of an argument, which may be a tuple or a list of tensors."""
    if isinstance(kind, tf.TensorSpec) and _is_known(kind):
        return tf.TensorSpec([None, *kind.shape[1:]], kind.dtype, kind.name)
    if type(kind).__name__ == "Tuple":
        return type(kind)(*map(_relaxed_type, kind.components))
    if type(kind).__name__ == "List":
        return type(kind)(*map(_relaxed_type, kind.components_tuple.components))
    return kind


def of_any_rows(dataset: Dataset) -> Dataset:
    """The same elements, of which no dense tensor has a known first dimension."""
    is_tuple = isinstance(dataset.element_spec, tuple)

    def relaxed(*element: Any) -> Any:
        result = tf.nest.map_structure(_relaxed, element)
        return result if is_tuple else result[0]

    return dataset.map(relaxed)


def _relaxed(tensor: Tensor) -> Tensor:
    if not _is_known(tensor):
        return tensor
    return tf.compat.v1.placeholder_with_default(tensor, [None, *tensor.shape[1:]])


def _is_known(tensor: Any) -> bool:
    """Whether it is, or describes, a dense tensor with a known first dimension."""
    return (
        isinstance(tensor, tf.Tensor | tf.TensorSpec)
        and bool(tensor.shape.rank)
        and tensor.shape[0] is not None
    )


STRIDE = 7_368_787
"""A prime, so that the seeds of different ranks rarely coincide."""

_SEEDS = 1 << 31


def shuffle_per_rank(rank: int) -> None:
    """Put the hook in place; a seed that is already set gets this rank's offset."""
    handler = partial(_set_seed, rank)
    tf_patches.TABLE.install({tf_patches.SET_SEED: handler})
    seed = tf.compat.v1.get_seed(0)[0]
    if seed is not None:
        tf.random.set_seed(seed)


def _set_seed(
    rank: int,
    original: Callable[[object], None],
    seed: int | np.integer[Any] | None,
) -> None:
    if isinstance(seed, int):
        seed = (seed + rank * STRIDE) % _SEEDS
    original(seed)
