"""Detects a running program that distributes its training by itself.

If the program applies gradients that it has all-reduced itself, the runtime does
nothing for it from then on. A program that shards its dataset by rank is refused: the
runtime divides its batches as well, so most of the data would never be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import tensorflow as tf

from tfcluster.runtime import tf_internals, tf_patches
from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.exchange.reduced_tensors import reduced
from tfcluster.runtime.keras import patches
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.types import Model
from tfcluster.runtime.scripts import program_kind
from tfcluster.runtime.tensor_types import Dataset, Nest


class OwnExchanges:
    """The outermost checks: if they find something, no hook runs from then on."""

    def __init__(self, session: Session, rank: int, size: int) -> None:
        self._session = session
        self._place = size, rank
        self._parted = False
        """Whether the program's last loop iterates over a shard of a dataset."""

    def install(self) -> None:
        """Install the hooks in Keras and TensorFlow, once per process."""
        patches.TABLE.install({patches.MODEL_FIT: self._fit})
        tf_patches.TABLE.install(
            {
                tf_patches.TAPE_GRADIENT: reduced.gradients,
                tf_patches.DATASET_ITER: self._iter,
            }
        )

    def apply_begins(self, *, exchanged: bool) -> None:
        """Called when an optimizer applies gradients.

        ``exchanged`` is true if the program itself has exchanged them. Raises
        CollectiveError if it has not, but shards its dataset by rank.
        """
        if exchanged:
            program_kind.claim_distribution()
        elif self._parted and not self._session.inside_keras:
            raise self._refusal()

    def _iter(
        self, original: Callable[[Dataset], Iterator[Nest]], dataset: Dataset
    ) -> Iterator[Nest]:
        if not self._session.inside_keras:
            self._parted = self._takes_a_part(dataset)
        return original(dataset)

    def _fit(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        data = args[0] if args else kwargs.get("x")
        if isinstance(data, tf.data.Dataset) and self._takes_a_part(data):
            raise self._refusal()
        return original(model, *args, **kwargs)

    def _takes_a_part(self, dataset: Dataset) -> bool:
        """Whether the program has sharded a dataset by ``shard(size, rank)``.

        Detects nothing on rank 0, where all ranks might read that first shard.
        """
        size, rank = self._place
        if not self._session.divides or rank == 0:
            return False
        waiting = [dataset]
        while waiting:
            found = waiting.pop()
            if tf_internals.shard_of(found) == (size, rank):
                return True
            waiting.extend(tf_internals.inputs_of(found))
        return False

    def _refusal(self) -> CollectiveError:
        size, rank = self._place
        # Rank 0 detects nothing, and waits for this rank. Rank 0 must see that this
        # rank leaves, and a rank that was never connected cannot report that.
        with suppress(CollectiveError):
            self._session.group.join()
        return CollectiveError(
            f"the program takes part {rank} of {size} of its dataset (shard), and its "
            "batches would be divided among the ranks again: most of the data would "
            "never be used. Remove shard(), or set runtime.batch: per_worker so that "
            "each rank trains on its own batches"
        )
