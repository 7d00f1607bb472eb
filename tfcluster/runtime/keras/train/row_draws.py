"""Random numbers of a training step are those that one machine draws for the batch.

All ranks have the same seeds. One machine draws an array with a row, or several, for
each row of the whole batch; each rank draws the part that belongs to its rows. An array
whose first dimension has another size belongs to no rows, and is the same on all ranks.
So is noise on gradients: an array with the shape of a gradient that is not applied yet.
So dropout, noise and augmentation are equal to one machine's.

TensorFlow's generator is counter-based (Philox; Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", 2011), so a rank can begin in the middle of an array.

A few distributions (gamma, categorical, ...) need a number of draws that depends on
the values. Their seeds differ by rank, so that ranks do not draw the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfcluster.runtime.keras import patches
from tfcluster.runtime.keras.data.dataset_iteration import DatasetIteration
from tfcluster.runtime.keras.data.per_rank_shuffle import STRIDE
from tfcluster.runtime.keras.session import DOUBLING_RANK, OF_ALL_ROWS, Session
from tfcluster.runtime.keras.types import SeedGenerator
from tfcluster.runtime.tensor_types import DType, Tensor

_BLOCK_BITS = 128
"""What the generator draws at once."""
_APART = "drawing numbers of this rank's own"
_INITIALIZES = "initializing a weight"


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where this rank's rows are in the whole batch; numbers or scalar tensors."""

    first: Any
    present: Any
    """How many rows this rank computes; 0 if the batch is not divided."""
    doubles: Any
    """Whether it computes each of its rows twice, in a trial."""
    any_size: bool
    """Whether the graph is for batches of any size: a fixed size is not that of rows.
    A ``tf.function`` of the program is traced for each size of its batches."""


class RowDraws:
    """The hooks on TensorFlow's stateless random ops and Keras's seeds."""

    def __init__(self, session: Session, loops: DatasetIteration) -> None:
        self._session = session
        self._loops = loops

    def install(self) -> None:
        patches.TABLE.install(
            {
                patches.SEED_GENERATOR_NEXT: self._next,
                patches.STATELESS_UNIFORM: self._skipping,
                patches.STATELESS_NORMAL: self._skipping,
                patches.STATELESS_UNIFORM_INT: self._slicing,
                patches.INITIALIZER_CALL: self._initializes,
                patches.STATELESS_TRUNCATED_NORMAL: self._slicing,
                **dict.fromkeys(patches.OTHER_DRAWS, self._apart),
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
        seed = original(generator, *args, **kwargs)
        if session.share is None:
            return seed
        session.draws += 1
        by_rows = session.share.total is not None and not session.within(_APART)
        if session.chief or by_rows:
            return seed
        moved: Tensor = seed + tf.constant([session.rank * STRIDE, 0], seed.dtype)
        return moved

    def _apart(self, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
        with self._session.once(_APART):
            return original(*args, **kwargs)

    def _initializes(
        self, original: Callable[..., Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        """A weight may have as many rows as a batch, but they are not its rows."""
        with self._session.once(_INITIALIZES):
            return original(*args, **kwargs)

    # --- draws ------------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _skipping(
        self,
        original: Callable[..., Tensor],
        shape: Any,
        key: Tensor,
        counter: Tensor,
        alg: Any,
        dtype: DType = tf.float32,
        name: str | None = None,
    ) -> Tensor:
        """Draw only this rank's part: ``original`` draws a fixed number per element."""

        def draw(begin: Tensor, shape: Tensor) -> Tensor:
            inner = tf.reduce_prod(tf.cast(shape[1:], tf.int64))
            each = _BLOCK_BITS // max(32, 8 * tf.as_dtype(dtype).size)
            block, skipped = begin * inner // each, begin * inner % each
            count = tf.cast(shape[0], tf.int64) * inner
            blocks = tf.stack(
                [tf.cast(block, counter.dtype), tf.zeros([], counter.dtype)]
            )
            drawn = original(
                tf.reshape(skipped + count, [1]),
                key,
                counter + blocks,
                alg,
                dtype,
                name,
            )
            part: Tensor = tf.reshape(drawn[skipped:], shape)
            return part

        return self._of_rows(
            shape, draw, lambda: original(shape, key, counter, alg, dtype, name)
        )

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _slicing(
        self, original: Callable[..., Tensor], shape: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Draw up to this rank's part, and drop what comes before it."""

        def draw(begin: Tensor, shape: Tensor) -> Tensor:
            end = begin + tf.cast(shape[0], tf.int64)
            whole = tf.concat([[tf.cast(end, shape.dtype)], shape[1:]], 0)
            return original(whole, *args, **kwargs)[begin:]

        return self._of_rows(shape, draw, lambda: original(shape, *args, **kwargs))

    def _of_rows(
        self,
        shape: Any,
        draw: Callable[[Tensor, Tensor], Tensor],
        plain: Callable[[], Tensor],
    ) -> Tensor:
        """What ``draw`` returns for this rank's part of an array of this shape.

        ``draw`` gets the first row (int64) and the shape of the part. ``plain`` is for
        arrays that belong to no rows.
        """
        rows = self._rows()
        if rows is None:
            return plain()
        sizes = tf.convert_to_tensor(shape, name="shape")
        if sizes.shape.rank != 1 or sizes.shape[0] == 0:
            return plain()
        # Elements are known separately: a mask may have a fixed first dimension.
        lengths = tf.get_static_value(sizes, partial=True)
        length = None if lengths is None else lengths[0]
        present = _static(rows.present)
        if length is not None and present is None and rows.any_size:
            return plain()
        known = length is not None and present is not None
        if known and (not present or not length or int(length) % present):
            return plain()
        static = tf.get_static_value(sizes)
        if static is not None and self._is_of_gradients(tuple(map(int, static))):
            return plain()
        found = self._part(rows, sizes, draw)
        if static is not None:
            found.set_shape([int(size) for size in static])
        elif not tf.executing_eagerly():
            found.set_shape(tf.TensorShape([None] * int(sizes.shape[0])))
        return found

    def _is_of_gradients(self, shape: tuple[int, ...]) -> bool:
        """Whether the numbers change gradients, which have no rows of the batch.

        Some programs add noise to each gradient, others to all in one vector.
        """
        shapes = self._session.unapplied.values()
        return shape in shapes or shape == (sum(map(math.prod, shapes)),)

    def _part(
        self, rows: _Rows, sizes: Tensor, draw: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        length = tf.cast(sizes[0], tf.int64)
        present = tf.cast(rows.present, tf.int64)
        each = tf.math.floordiv(length, tf.maximum(present, 1))
        fits = (present > 0) & tf.equal(each * present, length)
        begin = tf.where(fits, tf.cast(rows.first, tf.int64) * each, 0)
        if rows.doubles is False:
            return draw(begin, sizes)
        # Both copies of a row get the same numbers.
        distinct = tf.where(fits & rows.doubles, length // 2, length)
        drawn = draw(begin, tf.concat([[tf.cast(distinct, sizes.dtype)], sizes[1:]], 0))
        repeated: Tensor = tf.gather(drawn, tf.range(length) % tf.maximum(distinct, 1))
        return repeated

    def _rows(self) -> _Rows | None:
        """This rank's rows in the current step; None if nothing is divided."""
        session, share = self._session, self._session.share
        if session.within(_INITIALIZES) or session.within(OF_ALL_ROWS):
            return None
        if share is not None:
            if share.undivided is True or share.total is None or share.alone:
                return None
            present = share.present
            if share.undivided is not False:
                present = tf.where(share.undivided, tf.zeros_like(present), present)
            trial = share.trial if self._may_double() else False
            any_size = not tf.executing_eagerly()
            return _Rows(share.first, present, trial, any_size)
        if session.inside_keras or not session.divides:
            return None
        loops = self._loops
        doubles = loops.doubles.read() if self._may_double() else False
        first, present = loops.first.read(), loops.present.read()
        return _Rows(first, present, doubles, any_size=False)

    def _may_double(self) -> bool:
        session = self._session
        return session.trials is not None and session.rank == DOUBLING_RANK


def _static(number: Any) -> int | None:
    """The number if it is known while a graph is traced."""
    found = tf.get_static_value(number) if tf.is_tensor(number) else number
    return None if found is None else int(found)
