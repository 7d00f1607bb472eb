"""Dropout and augmentation draw different numbers on each rank, as for different rows.

The states of the seed generators stay equal on all ranks; only the seeds drawn in a
training step are offset by the rank. In a trial (see ``loss_scaling_probe``) the rank
that has the chief's rows also draws the chief's numbers, and dropout uses them for both
copies of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfcluster.runtime.keras import patches
from tfcluster.runtime.keras.data.dataset_iteration import DatasetIteration
from tfcluster.runtime.keras.data.per_rank_shuffle import STRIDE
from tfcluster.runtime.keras.session import DOUBLING_RANK, Session


class PerRankSeeds:
    """The hooks on ``SeedGenerator.next`` and dropout."""

    def __init__(self, session: Session, loops: DatasetIteration) -> None:
        self._session = session
        self._loops = loops

    def install(self) -> None:
        patches.TABLE.install(
            {
                patches.SEED_GENERATOR_NEXT: self._next,
                patches.DROPOUT: self._dropout,
            }
        )

    def _next(
        self, original: Callable[..., Any], generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        seed = original(generator, *args, **kwargs)
        if self._session.share is None:
            return seed
        self._session.draws += 1
        if self._session.chief:
            return seed
        moved = seed + tf.constant([self._session.rank * STRIDE, 0], seed.dtype)
        doubles = self._doubles()
        return moved if doubles is False else tf.where(doubles, seed, moved)

    def _dropout(
        self,
        original: Callable[..., Any],
        inputs: Any,
        rate: Any,
        noise_shape: Sequence[Any] | None = None,
        seed: Any = None,
    ) -> Any:
        doubles = self._doubles()
        inputs = tf.convert_to_tensor(inputs)

        def plain() -> Any:
            return original(inputs, rate, noise_shape, seed)

        def alike() -> Any:
            rows = tf.shape(inputs)[0]
            # If this dimension is not that of the rows, any other mask is as good.
            half = tf.ones_like(inputs[: (rows + 1) // 2])
            kept = original(half, rate, _of_all_rows(noise_shape), seed)
            return inputs * tf.concat([kept, kept], 0)[:rows]

        if inputs.shape.rank == 0:
            return plain()
        if isinstance(doubles, bool):
            return alike() if doubles else plain()
        return tf.cond(doubles, alike, plain)

    def _doubles(self) -> Any:
        """Whether each row comes twice in this step: a bool or a boolean tensor."""
        session = self._session
        if session.trials is None or session.rank != DOUBLING_RANK:
            return False
        if session.share is not None:
            return session.share.trial
        return False if session.inside_keras else self._loops.doubles.read()


def _of_all_rows(noise_shape: Sequence[Any] | None) -> Sequence[Any] | None:
    """``noise_shape`` for any number of rows, unless all rows share one mask."""
    if noise_shape is None or (isinstance(noise_shape[0], int) and noise_shape[0] == 1):
        return noise_shape
    return [None, *noise_shape[1:]]
