"""Finds which part of an array of random numbers belongs to this rank's rows.

One machine draws an array whose first dimension has one or several entries for each row
of the whole batch. A rank needs the entries of its own rows. An array whose first
dimension has another size belongs to no rows, and is the same on all ranks. The same
applies to noise on gradients: an array with the shape of a gradient that is not applied
yet.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfcluster.runtime import tf_internals
from tfcluster.runtime.collective import Signature
from tfcluster.runtime.collective.collectives import allgather_bytes
from tfcluster.runtime.keras.batches.batch_slicing import has_rows
from tfcluster.runtime.keras.data.dataset_iteration import DatasetIteration
from tfcluster.runtime.keras.inner_functions import InnerFunctions
from tfcluster.runtime.keras.program_lines import user_line
from tfcluster.runtime.keras.random.array_lengths import ArrayLengths
from tfcluster.runtime.keras.session import OF_ALL_ROWS, TRIAL_RANK, Session
from tfcluster.runtime.tensor_types import (
    DType,
    Flag,
    Graph,
    Number,
    ShapeLike,
    Tensor,
    Weight,
)

_BLOCK_BITS = 128
"""Bits per block that the generator produces."""
IN_ROW_LOOP = "a loop that may run once for each row"
ALIKE = "drawing the same numbers on all ranks"


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where this rank's rows are in the whole batch; numbers or scalar tensors."""

    first: Number
    present: Weight
    """The number of rows that this rank computes."""
    total: Weight
    """The number of rows in the whole batch."""
    doubles: Flag
    """Whether this rank computes each of its rows twice, in a trial."""
    undivided: Flag
    """Whether every rank computes all rows, and so draws the same numbers."""
    any_size: bool
    """Whether the graph serves batches of any size, so that a fixed dimension cannot be
    the number of rows. A ``tf.function`` of the program is traced for each size of its
    batches."""


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of the first dimension of an array of random numbers.

    All numbers are int64 scalars.
    """

    sizes: Tensor
    """The shape of the array that the program asked for, a vector of integers."""
    begin: Tensor
    """The first entry of this rank in the array of the whole batch."""
    distinct: Tensor
    """The number of entries that this rank draws."""
    length: Tensor
    """The number of entries that this rank needs: in a trial it may need each twice."""
    whole: Tensor
    """The number of entries in the array of the whole batch."""
    repeats: bool
    """Whether ``length`` may be larger than ``distinct``."""

    def shape(self, entries: Tensor) -> Tensor:
        """The shape of such an array with ``entries`` entries."""
        first = tf.reshape(tf.cast(entries, self.sizes.dtype), [1])
        return tf.concat([first, self.sizes[1:]], 0)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's entries of an array of the whole batch."""
        # A rank that gets no rows of a small batch computes one that does not count.
        places = self.begin + tf.range(self.distinct)
        return self.finished(tf.gather(whole, places % tf.maximum(self.whole, 1)))

    def of_whole(self, own: Tensor) -> Tensor:
        """An array of the whole batch with this rank's entries at their positions.

        The other entries are repetitions, so that they are valid parameters of
        distributions. If ``own`` has a single entry, it applies to all rows.
        """
        places = (tf.range(self.whole) - self.begin) % tf.maximum(self.whole, 1)
        places = tf.where(places < self.distinct, places, tf.zeros_like(places))
        last = tf.shape(own, out_type=tf.int64)[0] - 1
        whole: Tensor = tf.gather(own, tf.minimum(places, last))
        return whole

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def skip_to(
        self,
        draw: Callable[..., Tensor],
        key: Tensor,
        counter: Tensor,
        dtype: DType,
    ) -> Tensor:
        """This rank's entries, if ``draw`` draws a fixed number of bits for each one.

        ``draw(shape=, key=, counter=)`` is ``tf.raw_ops.StatelessRandomNormalV2`` for
        ``dtype``, or the like: ``key`` is uint64 of shape (1,), ``counter`` uint64 of
        shape (2,). The result has the requested shape. A counter counts blocks
        of 128 bits: Philox4x32, Salmon et al., "Parallel Random Numbers: As Easy as 1,
        2, 3", 2011, as in TensorFlow's philox_random.h.
        """
        inner = tf.reduce_prod(tf.cast(self.sizes[1:], tf.int64))
        each = _BLOCK_BITS // max(32, 8 * tf.as_dtype(dtype).size)
        block, skipped = self.begin * inner // each, self.begin * inner % each
        blocks = tf.stack([tf.cast(block, counter.dtype), tf.zeros([], counter.dtype)])
        count = tf.reshape(skipped + self.distinct * inner, [1])
        drawn = draw(shape=count, key=key, counter=counter + blocks)
        return self.finished(tf.reshape(drawn[skipped:], self.shape(self.distinct)))

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def slice_of(
        self, draw: Callable[..., Tensor], *args: Any, **kwargs: Any
    ) -> Tensor:
        """This rank's entries, if longer arrays begin with the shorter ones."""
        drawn = draw(self.shape(self.begin + self.distinct), *args, **kwargs)
        return self.finished(drawn[self.begin :])

    def finished(self, drawn: Tensor) -> Tensor:
        """``drawn``, this rank's distinct entries, in the requested shape."""
        if self.repeats:
            # Both copies of a row get the same numbers.
            places = tf.range(self.length) % tf.maximum(self.distinct, 1)
            drawn = tf.gather(drawn, places)
        static = tf.get_static_value(self.sizes)
        if static is not None:
            drawn.set_shape(
                tf.TensorShape([int(size) for size in static]).concatenate(
                    drawn.shape[len(static) :]
                )
            )
        return drawn


class DrawnRows:
    """Finds this rank's part of arrays of random numbers in the current step."""

    def __init__(
        self, session: Session, loops: DatasetIteration, functions: InnerFunctions
    ) -> None:
        self._session = session
        self._loops = loops
        self._lengths = ArrayLengths(functions)
        self._has_noise_of_batches = False

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def part(self, shape: ShapeLike, *, may_be_noise: bool = False) -> Part | None:
        """This rank's part of an array of this shape; None if it belongs to no rows.

        ``shape`` is a vector of integers, a list or a tensor. With ``may_be_noise``, an
        array that has as many entries as the whole batch has rows is the same on all
        ranks, even if that number is a multiple of this rank's rows. A generator of
        images gets such noise. From then on, all other arrays of this size, which
        change its images, are also the same on all ranks.
        """
        rows = self._rows()
        if rows is None and not self._has_whole_batch():
            return None
        sizes = tf.convert_to_tensor(shape, name="shape")
        if sizes.shape.rank != 1 or sizes.shape[0] == 0:
            return None
        # Elements are known separately: a mask may have a fixed first dimension.
        lengths = tf.get_static_value(sizes, partial=True)
        length = None if lengths is None or lengths[0] is None else int(lengths[0])
        present = None if rows is None else _static(rows.present)
        if rows is not None and rows.any_size and length and present is None:
            return None
        if length and self._is_fixed(length, present):
            return None
        if rows is None:
            return None
        if may_be_noise and length is not None:
            self._has_noise_of_batches |= self._is_whole_batch(length)
        if length == 0 or (length and present and length % present):
            return None
        static = tf.get_static_value(sizes)
        if static is not None and self._is_of_gradients(tuple(map(int, static))):
            return None
        alike = may_be_noise or self._has_noise_of_batches
        return _part(rows, sizes, may_be_noise=alike)

    def _has_whole_batch(self) -> bool:
        """Whether an eager step of a loop gets a whole batch, as the first ones do."""
        session = self._session
        if session.share is not None or not session.divides or session.within(ALIKE):
            return False
        return session.loop.in_pass and tf.executing_eagerly()

    def _is_fixed(self, length: int, present: int | None) -> bool:
        """Whether the length of an array is known to be the same for all batches."""
        session, rows = self._session, present
        if session.share is None and not tf.executing_eagerly():
            rows = rows_of_graph(tf_internals.outermost_graph())
            if rows is None:
                return False  # One graph serves batches of all sizes.
        elif rows is None:
            rows = session.loop.whole_rows
        known = present is not None and self._is_fixed_in_trial(length, present)
        step = session.share or session.loop.share
        return self._lengths.is_fixed(rows, length, step, known=known)

    def _is_fixed_in_trial(self, length: int, present: int) -> bool:
        """Whether all ranks draw as many numbers in a trial, for other numbers of rows.

        ``fit`` makes the first step a trial, so nothing is known from an earlier one.
        All ranks call this at the same point.
        """
        session = self._session
        if session.share is None or session.share.trial is not True:
            return False
        ours = json.dumps([present, length]).encode()
        signature = Signature("numbers of random numbers")
        ranks = [
            json.loads(data) for data in allgather_bytes(session.group, ours, signature)
        ]
        rows, lengths = map(set, zip(*ranks, strict=True))
        return len(lengths) == 1 < len(rows)

    def divides(self) -> bool:
        """Whether the code that is traced or runs gets only this rank's rows."""
        session, share = self._session, self._session.share
        if session.within(ALIKE) or session.within(OF_ALL_ROWS):
            return False
        if share is not None:
            return not (share.undivided is True or share.total is None or share.alone)
        loop = session.loop
        if session.inside_keras or not session.divides or not loop.in_pass:
            return False
        # A function that is traced for the first batch may serve its parts as well.
        return loop.divided or _serves_any_size()

    def may_be_rows(self, number: int | None) -> bool:
        """Whether ``number`` (None if unknown) may be this rank's number of rows."""
        share = self._session.share
        if number is None or share is None:
            return number in (None, self._computed_rows())
        sizes = [
            leaf.shape[0] for leaf in tf.nest.flatten(share.data) if has_rows(leaf)
        ]
        present = _static(share.present)
        return (not sizes and present is None) or number in (*sizes, present)

    def warn_in_row_loop(self) -> None:
        """Warn if this draw advances a state in a loop that may run over rows."""
        if self._session.within(IN_ROW_LOOP) and self.divides():
            self._session.warn(
                f"{user_line()}: the step draws random numbers in a loop (tf.map_fn, "
                "tf.vectorized_map, tf.while_loop). If this loop runs over the rows of "
                "a batch, the result differs from that of one machine: the loop of "
                "each rank begins with the numbers of the first row of the whole "
                "batch. Draw the numbers of all rows at once, before the loop, as an "
                "array whose first dimension is the number of rows, such as "
                "tf.random.uniform([tf.shape(x)[0]]), and pass them to the loop. If "
                "it runs over anything else, such as time steps, the result is the "
                "same as on one machine"
            )

    def are_rows(self, tensor: Tensor) -> bool:
        """Whether a tensor seems to have one entry for each of this rank's rows.

        ``tensor`` has any shape; a scalar has no rows.
        """
        rows = self._rows()
        if rows is None or not tensor.shape.rank:
            return False
        length, present = tensor.shape[0], _static(rows.present)
        if present is None and self._session.share is None:
            # The graph is traced for batches of this size.
            present = self._computed_rows()
        return length is None or bool(length == present)

    def _is_whole_batch(self, length: int) -> bool:
        """Whether a loop's whole batch has this many rows, and this rank's part not."""
        if self._session.share is not None:
            return False
        present = self._computed_rows()
        return (
            present is not None and present != length == self._session.loop.share.total
        )

    def _computed_rows(self) -> int | None:
        """The rows that this rank computes of a loop's batch; None if it has all."""
        present = self._session.loop.present_rows()
        return None if present is None else max(present, 1)

    def _is_of_gradients(self, shape: tuple[int, ...]) -> bool:
        """Whether the numbers change gradients, which have no rows of the batch.

        Some programs add noise to each gradient, others to one vector of all gradients.
        """
        shapes = self._session.unapplied.values()
        return shape in shapes or shape == (sum(map(math.prod, shapes)),)

    def _rows(self) -> _Rows | None:
        """This rank's rows in the current step; None if nothing is divided."""
        session, share = self._session, self._session.share
        if session.within(ALIKE) or session.within(OF_ALL_ROWS):
            return None
        any_size = share is not None and not tf.executing_eagerly()
        if share is None:
            if session.inside_keras or not session.divides:
                return None
            if not tf.compat.v1.executing_eagerly_outside_functions():
                return None  # A program of TensorFlow 1 divides its data itself.
            share = self._loops.trained.read()
        if share.undivided is True or share.total is None or share.alone:
            return None
        # A rank without rows computes one that does not count.
        present = share.present
        if tf.is_tensor(present):
            present = tf.maximum(present, tf.ones_like(present))
        else:
            present = max(present, 1)
        may_double = session.trials is not None and session.part == TRIAL_RANK
        return _Rows(
            first=share.first,
            present=present,
            total=share.total,
            doubles=share.trial if may_double else False,
            undivided=share.undivided,
            any_size=any_size,
        )


def rows_of_graph(graph: Graph) -> int | None:
    """The rows of the first array that a ``tf.function`` gets; None if they vary."""
    shapes = (
        op.outputs[0].shape
        for op in graph.get_operations()
        if op.type == "Placeholder" and op.outputs[0].shape.rank
    )
    first = next(shapes, None)
    return None if first is None else first[0]


def _serves_any_size() -> bool:
    """Whether a graph that serves batches of any size is being traced."""
    if tf.executing_eagerly():
        return False
    return rows_of_graph(tf_internals.outermost_graph()) is None


def _part(rows: _Rows, sizes: Tensor, *, may_be_noise: bool) -> Part:
    length = tf.cast(sizes[0], tf.int64)
    present, total = tf.cast(rows.present, tf.int64), tf.cast(rows.total, tf.int64)
    each = tf.math.floordiv(length, present)
    fits = tf.equal(each * present, length) & ~tf.cast(rows.undivided, tf.bool)
    if may_be_noise:
        # Any size is a multiple of one: a small last batch may have a single row.
        several = (present > 1) & tf.not_equal(length, total)
        fits &= tf.equal(length, present) | several
    begin = tf.where(fits, tf.cast(rows.first, tf.int64) * each, 0)
    whole = tf.where(fits, total * each, length)
    if rows.doubles is False:
        return Part(sizes, begin, length, length, whole, repeats=False)
    distinct = tf.where(fits & rows.doubles, length // 2, length)
    return Part(sizes, begin, distinct, length, whole, repeats=True)


def _static(number: Weight) -> int | None:
    """The number if it is known while a graph is traced."""
    found = tf.get_static_value(number) if tf.is_tensor(number) else number
    return None if found is None else int(found)
