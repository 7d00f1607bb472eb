"""``predict`` on the rows of each rank: the ranks put them together once, at the end.

Nobody but Keras sees the outputs of a batch, if no callback wants them. Keras joins
those of all batches, so each rank gets its own rows of all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import Group, Signature, tensor_words
from tfcluster.runtime.keras.train.injected_callbacks import sees_predictions
from tfcluster.runtime.keras.types import Model
from tfcluster.runtime.partition.hook import Hook
from tfcluster.runtime.partition.host_rows import gathered
from tfcluster.runtime.partition.placement import Shard, Split
from tfcluster.runtime.tensor_types import Array, Nest, Tensor


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows of an output in successive batches."""

    count: int
    """How many rows this rank has of each batch."""
    shard: Shard | None
    """The placement of each batch; None if every rank has all rows of it."""


@dataclass(slots=True)
class Predictions:
    """The outputs of ``predict`` so far."""

    what: str
    batches: list[list[BatchRows]] = field(default_factory=list)
    """For each batch the rows of each output."""

    def whole(self, group: Group, result: Nest) -> Nest:
        """The result of ``predict``, of which every rank has its own rows.

        Arrays have this rank's rows of the first batch, then those of the second, and
        so on. Raises CollectiveMismatchError if the ranks have predicted other batches,
        and what ``Group.exchange`` raises.
        """
        arrays = keras.tree.flatten(result)
        outputs = list(zip(*self.batches, strict=True))
        if not any(rows.shard for output in outputs for rows in output):
            return result
        words = tuple(
            tensor_words(f"output {i}", array.dtype.name, (None, *array.shape[1:]))
            for i, array in enumerate(arrays)
        )
        signature = Signature(f"{len(self.batches)} batches of {self.what}", words)
        with group.exchange(signature) as call:
            joined = [
                np.concatenate(
                    [
                        rows if shard is None else gathered(call.transport, rows, shard)
                        for rows, shard in _runs(array, output)
                    ]
                )
                for array, output in zip(arrays, outputs, strict=True)
            ]
        return keras.tree.pack_sequence_as(result, joined)


def _runs(
    array: Array, output: Sequence[BatchRows]
) -> Iterator[tuple[Array, Shard | None]]:
    """The rows of successive batches of equal size, with one placement for them all."""
    start = 0
    for rows, same in itertools.groupby(output):
        batches = len(list(same))
        end = start + rows.count * batches
        shard = rows.shard
        yield array[start:end], shard and replace(shard, outer=batches)
        start = end


@contextmanager
def rows_kept(model: Model, hook: Hook, split: Split) -> Iterator[Predictions]:
    """A context in which ``predict`` gets this rank's rows; see ``can_keep_rows``."""
    predictions = Predictions(f"predictions of {model.name}")
    function = model.predict_function
    assert function is not None

    def predict(data: Any) -> Nest:
        with hook.keeping_parts():
            outputs = function(data)
        flat = list(tf.nest.flatten(outputs, expand_composites=True))
        kept = [_rows_of(tensor, hook, split) for tensor in flat]
        if len(keras.tree.flatten(outputs)) != len(flat) or None in kept:
            flat = list(hook.whole(flat))
            outputs = tf.nest.pack_sequence_as(outputs, flat, expand_composites=True)
            kept = [BatchRows(_count(tensor), None) for tensor in flat]
        predictions.batches.append([rows for rows in kept if rows is not None])
        return outputs

    model.predict_function = predict
    try:
        yield predictions
    finally:
        model.predict_function = function


def _rows_of(tensor: Tensor, hook: Hook, split: Split) -> BatchRows | None:
    """The rows of an output of a batch; None if it is divided in another way."""
    part = hook.part_of(tensor)
    if part is None:
        return BatchRows(_count(tensor), None)
    if part.shard.dim or part.shard.outer > 1:
        return None
    return BatchRows(split.local_size(part.shard), part.shard)


def _count(tensor: Tensor) -> int:
    return int(tensor.shape[0]) if tensor.shape.rank else 0


def can_keep_rows(model: Model, callbacks: Nest) -> bool:
    """Whether only Keras's own ``predict`` will see the outputs of a batch."""
    own_function = type(model).make_predict_function is not (
        keras.Model.make_predict_function
    )
    if own_function or model.run_eagerly or sees_predictions(callbacks):
        return False
    model.make_predict_function()
    return isinstance(model.predict_function, tf.types.experimental.PolymorphicFunction)
