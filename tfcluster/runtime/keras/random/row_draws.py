"""Makes a training step draw the random numbers of one machine for the batch.

All ranks have the same seeds. Each rank draws the numbers of its rows in the whole
batch (see ``drawn_rows``), so dropout, noise and augmentation are the same as on one
machine.

TensorFlow's generator is counter-based (Philox; Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", 2011), so a rank can begin in the middle of an array of
stateless random numbers. Where the number of draws depends on the drawn values, each
rank draws the numbers of the whole batch. ``stateful_draws`` handles the ops that keep
a state.

A shuffle of rows moves them between ranks, so ranks shuffle their own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from tfcluster.runtime import tf_patches
from tfcluster.runtime.keras import patches
from tfcluster.runtime.keras.data.per_rank_shuffle import STRIDE
from tfcluster.runtime.keras.random.drawn_rows import ALIKE, DrawnRows
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.types import SeedGenerator
from tfcluster.runtime.tensor_types import DType, ShapeLike, Tensor, TensorLike

_APART = "drawing numbers of this rank's own"


class RowDraws:
    """The hooks on TensorFlow's stateless random ops, shuffles and Keras's seeds."""

    def __init__(self, session: Session, rows: DrawnRows) -> None:
        self._session = session
        self._rows = rows

    def install(self) -> None:
        """Install the hooks in Keras and TensorFlow, once per process."""
        patches.TABLE.install(
            {
                patches.SEED_GENERATOR_NEXT: self._next,
                patches.INITIALIZER_CALL: self._alike,
                patches.KERAS_SHUFFLE: self._shuffle_of_keras,
            }
        )
        tf_patches.TABLE.install(
            {
                tf_patches.DATASET_FUNCTION: self._alike,
                tf_patches.STATELESS_UNIFORM: self._skipping,
                tf_patches.STATELESS_NORMAL: self._skipping,
                tf_patches.STATELESS_UNIFORM_INT: self._slicing,
                tf_patches.STATELESS_TRUNCATED_NORMAL: self._slicing,
                **dict.fromkeys(tf_patches.DRAWS_BY_PARAMETERS, self._by_parameters),
                tf_patches.STATELESS_CATEGORICAL: self._categorical,
                tf_patches.TENSORFLOW_SHUFFLE: self._shuffle_of_tensorflow,
            }
        )

    # --- seeds ------------------------------------------------------------------------

    def _next(
        self,
        original: Callable[..., Tensor],
        generator: SeedGenerator,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        session = self._session
        self._rows.warn_in_row_loop()
        seed = original(generator, *args, **kwargs)
        if session.share is None:
            return seed
        session.draws += 1
        by_rows = session.share.total is not None and not session.within(_APART)
        if session.part == 0 or by_rows:
            return seed
        moved: Tensor = seed + tf.constant([session.part * STRIDE, 0], seed.dtype)
        return moved

    def _alike(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Draw the same numbers on all ranks, whatever the sizes of arrays.

        A weight may have as many rows as a batch, but they are not its rows. Functions
        of datasets get whole batches, which are divided afterwards.
        """
        with self._session.once(ALIKE):
            return original(*args, **kwargs)

    # --- draws of a fixed number per entry --------------------------------------------

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _skipping(
        self,
        original: Callable[..., Tensor],
        shape: ShapeLike,
        key: Tensor,
        counter: Tensor,
        alg: int | Tensor,
        dtype: DType = tf.float32,
        name: str | None = None,
    ) -> Tensor:
        """Draw only this rank's part: ``original`` draws a fixed number per element."""
        part = self._rows.part(shape)
        if part is None:
            return original(shape, key, counter, alg, dtype, name)
        draw = partial(original, alg=alg, dtype=dtype, name=name)
        return part.skip_to(draw, key, counter, dtype)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _slicing(
        self,
        original: Callable[..., Tensor],
        shape: ShapeLike,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Draw up to the end of this rank's part, and drop the numbers before it."""
        part = self._rows.part(shape)
        if part is None:
            return original(shape, *args, **kwargs)
        return part.slice_of(original, *args, **kwargs)

    # --- draws whose number depends on the drawn values -------------------------------

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _by_parameters(
        self,
        original: Callable[..., Tensor],
        shape: ShapeLike,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Draw for the whole batch; parameters may have one entry for each number."""
        part = self._rows.part(shape)
        if part is None:
            return original(shape, *args, **kwargs)
        rank = part.sizes.shape[0]

        def of_whole(given: Any) -> Any:
            # Seeds are vectors of integers.
            if not tf.is_tensor(given) or not given.dtype.is_floating:
                return given
            return part.of_whole(given) if given.shape.rank == rank else given

        args, kwargs = tf.nest.map_structure(of_whole, (args, kwargs))
        return part.own(original(part.shape(part.whole), *args, **kwargs))

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _categorical(
        self, original: Callable[..., Tensor], logits: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        part = self._rows.part(tf.shape(logits)[:1])
        if part is None:
            return original(logits, *args, **kwargs)
        return part.own(original(part.of_whole(logits), *args, **kwargs))

    # --- shuffles ---------------------------------------------------------------------

    def _shuffle_of_keras(
        self,
        original: Callable[..., Tensor],
        value: TensorLike,
        axis: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        shuffled = partial(original, value, axis, *args, **kwargs)
        rows: Tensor = tf.convert_to_tensor(value)
        return self._shuffled(shuffled, rows if axis in (0, -rows.ndim) else None)

    def _shuffle_of_tensorflow(
        self,
        original: Callable[..., Tensor],
        value: TensorLike,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if self._session.current_shard is not None:
            self._session.refuse(
                "the step calls tf.random.shuffle, whose state TensorFlow keeps. With "
                "runtime.shards it would advance once for each shard of a rank. Use "
                "keras.random.shuffle"
            )
        shuffled = partial(original, value, *args, **kwargs)
        return self._shuffled(shuffled, tf.convert_to_tensor(value))

    def _shuffled(self, shuffled: Callable[[], Tensor], rows: Tensor | None) -> Tensor:
        """Shuffle; ``rows`` is the tensor shuffled along its first axis, if any."""
        if rows is None or not self._rows.are_rows(rows):
            return self._alike(shuffled)
        self._session.differs(
            "the program shuffles the rows of a batch in a training step: each rank "
            "shuffles only its own rows, so the result differs from that of one machine"
        )
        with self._session.once(_APART):
            return shuffled()
