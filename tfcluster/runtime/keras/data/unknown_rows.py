"""Lets Keras's steps compute batches of any number of rows.

With ``batch: per_worker``, a step that was traced for the rows of one rank's batch is
to compute those of all ranks: no constant of the step may come from their number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.types import EpochIterator
from tfcluster.runtime.tensor_types import Dataset, Tensor


def install() -> None:
    """Install the hook in Keras, once per process."""
    patches.TABLE.install({patches.EPOCH_ITERATOR: _begin})


def _begin(
    original: Callable[..., None], iterator: EpochIterator, *args: Any, **kwargs: Any
) -> None:
    original(iterator, *args, **kwargs)
    dataset = internals.dataset_of(iterator)
    if any(map(_is_known, tf.nest.flatten(dataset.element_spec))):
        internals.set_dataset(iterator, of_any_rows(dataset))


def of_any_rows(dataset: Dataset) -> Dataset:
    """The same elements, of which no dense tensor has a known first dimension."""
    is_tuple = isinstance(dataset.element_spec, tuple)

    def relaxed(*element: Any) -> Any:
        found = tf.nest.map_structure(_relaxed, element)
        return found if is_tuple else found[0]

    found: Dataset = dataset.map(relaxed)
    return found


def _relaxed(tensor: Tensor) -> Tensor:
    if not _is_known(tensor):
        return tensor
    found: Tensor = tf.compat.v1.placeholder_with_default(
        tensor, [None, *tensor.shape[1:]]
    )
    return found


def _is_known(tensor: Any) -> bool:
    """Whether it is, or describes, a dense tensor with a known first dimension."""
    return (
        isinstance(tensor, tf.Tensor | tf.TensorSpec)
        and bool(tensor.shape.rank)
        and tensor.shape[0] is not None
    )
