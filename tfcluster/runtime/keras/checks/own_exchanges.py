"""Detects, while a program runs, that it distributes its training by itself.

If it applies gradients that it has all-reduced itself, the runtime does nothing for it
from then on. If it shards its dataset by rank, it is refused: the runtime shards its
batches, too, so that most of its data would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.exchange.reduced_tensors import reduced
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.patching import defining_class, wrap
from tfcluster.runtime.scripts import self_distributed


class OwnExchanges:
    """The outermost hooks: what they find ends all others."""

    def __init__(self, session: Session, rank: int, size: int) -> None:
        self._session = session
        self._place = size, rank
        self._parted = False
        """Whether the program's last loop is over a part of a dataset."""

    def install(self) -> None:
        wrap(tf.GradientTape, "gradient", self._gradient)
        wrap(keras.optimizers.Optimizer, "apply", self._apply)
        wrap(keras.optimizers.LossScaleOptimizer, "apply", self._apply)
        wrap(tf.data.Dataset, "__iter__", self._iter)
        wrap(defining_class(keras.Model, "fit"), "fit", self._fit)

    def _gradient(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        reduced.gradients(found)
        return found

    def _apply(
        self,
        original: Callable[..., Any],
        optimizer: Any,
        grads: Sequence[Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        grads = list(grads)
        if reduced.applied(grads):
            self_distributed.claim()
        elif self._parted and not self._session.inside_keras:
            raise self._refusal()
        return original(optimizer, grads, *args, **kwargs)

    def _iter(self, original: Callable[..., Any], dataset: Any) -> Any:
        if not self._session.inside_keras:
            self._parted = self._takes_a_part(dataset)
        return original(dataset)

    def _fit(
        self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        data = args[0] if args else kwargs.get("x")
        if isinstance(data, tf.data.Dataset) and self._takes_a_part(data):
            raise self._refusal()
        return original(model, *args, **kwargs)

    def _takes_a_part(self, dataset: Any) -> bool:
        """Whether a dataset is this rank's, by ``shard(size, rank)``.

        On rank 0 that may as well be the first part of a dataset for all.
        """
        size, rank = self._place
        if not self._session.divides or rank == 0:
            return False
        waiting = [dataset]
        while waiting:
            found = waiting.pop()
            if type(found).__name__ == "_ShardDataset" and (
                _number(found, "_num_shards"),
                _number(found, "_index"),
            ) == (size, rank):
                return True
            waiting.extend(found._inputs())
        return False

    def _refusal(self) -> CollectiveError:
        size, rank = self._place
        return CollectiveError(
            f"the program takes part {rank} of {size} of its dataset (shard), and its "
            "batches would be divided among the ranks again: most of the data would "
            "never be used. Remove shard(), or set runtime.batch: per_worker so that "
            "each rank trains on its own batches"
        )


def _number(dataset: Any, name: str) -> int | None:
    """A tensor that a dataset of TensorFlow was made with; not public."""
    value = tf.get_static_value(getattr(dataset, name, None))
    return None if value is None else int(value)
