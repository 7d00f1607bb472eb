"""Finds which tensors of a custom loop have the rows of its current batch.

These are the batch itself, the tensors that the loop computes from it eagerly, and
random numbers that it draws for as many rows, like the noise for a GAN. This is for
``runtime.shards``, where a loop gets whole batches, and its functions divide them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfcluster.runtime import tf_internals, tf_patches
from tfcluster.runtime.keras.batches.batch_slicing import common_rows, has_rows
from tfcluster.runtime.tensor_types import Nest, Tensor

_MOST = 10_000
"""The most tensors that are remembered per batch: a program may keep its last batch."""


_RANDOM = ("Random", "StatelessRandom", "TruncatedNormal", "StatelessTruncatedNormal")


class LoopRows:
    """Follows the last batch of each pass over a dataset."""

    def __init__(self) -> None:
        self._batches: dict[int, _Batch] = {}
        """The batches by the iterators that yielded them."""

    def watched(self, iterator: Iterator[Nest]) -> Iterator[Nest]:
        """The same iterator; its batches are followed until the next one."""
        kind, key = type(iterator), id(iterator)
        weakref.finalize(iterator, self._end, key).atexit = False

        def following(one: Iterator[Nest]) -> Nest:
            self._end(key)
            batch = kind.__next__(one)
            self._begin(key, batch)
            return batch

        # Python looks up __next__ in the class; everything else must stay the same.
        watched = type(kind.__name__, (kind,), {"__next__": following})
        tf_patches.TABLE.replace(tf_patches.ONE_ITERATOR_CLASS, iterator, watched)
        return iterator

    def of(self, tensors: Sequence[Any]) -> list[int]:
        """The indices of the ``tensors`` that have the rows of one batch.

        Empty if there are none, or if these or other ``tensors`` may have other rows:
        then the function has to get all rows.
        """
        for batch in self._batches.values():
            places = [i for i, each in enumerate(tensors) if batch.has(each)]
            if places and not batch.is_kept:
                fits = all(batch.has_rows(tensors[place]) for place in places)
                others = [t for i, t in enumerate(tensors) if i not in places]
                return places if fits and not any(map(batch.has_rows, others)) else []
        return []

    def _begin(self, key: int, data: Nest) -> None:
        leaves = [leaf for leaf in tf.nest.flatten(data) if has_rows(leaf)]
        if not leaves:
            return
        rows, common = common_rows(leaves)
        if common is not True or not isinstance(rows, int) or not rows:
            return
        batch = self._batches[key] = _Batch(rows, leaves)
        tf_internals.observe_ops(batch)

    def _end(self, key: int) -> None:
        batch = self._batches.pop(key, None)
        if batch is not None:
            tf_internals.stop_observing_ops(batch)


class _Batch:
    """The tensors that depend on a batch."""

    def __init__(self, rows: int, leaves: Sequence[Tensor]) -> None:
        self.rows = rows
        # Kept alive, so that their ids remain valid.
        self._known = {id(leaf): leaf for leaf in leaves}
        self.is_kept = False
        """Whether the program has set a variable to rows of the batch."""

    def has(self, tensor: Any) -> bool:
        return id(tensor) in self._known

    def has_rows(self, tensor: Any) -> bool:
        """Whether a tensor or an array has as many rows as the batch."""
        return has_rows(tensor) and bool(tensor.shape[0] == self.rows)

    def __call__(
        self,
        kind: str | bytes,
        inputs: Sequence[Tensor],
        attrs: Sequence[Any],
        outputs: Sequence[Tensor],
        op_name: str | None = None,
        graph: tf.Graph | None = None,
    ) -> None:
        """TensorFlow calls this after each operation that it executes eagerly."""
        if graph is not None or len(self._known) >= _MOST:
            return
        name = kind.decode() if isinstance(kind, bytes) else kind
        known = [tensor for tensor in inputs if self.has(tensor)]
        if known:
            self.is_kept |= name.startswith("Assign") and any(map(self.has_rows, known))
            self._known.update((id(output), output) for output in outputs)
        elif name.startswith(_RANDOM):
            # These are random numbers for the rows of the batch: one for each row.
            self._known.update((id(o), o) for o in outputs if self.has_rows(o))
