"""Divide the batches of custom training loops over a ``tf.data.Dataset``.

A loop counts as a training loop once a gradient has been applied between two of its
batches. From then on the iterator yields only this rank's rows. So every rank computes
the whole first batch, and loops that only inspect data or predict see all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime.keras import patches
from tfcluster.runtime.keras.batches.batch_sharding import bounds, trial_bounds
from tfcluster.runtime.keras.batches.batch_slicing import (
    common_rows,
    cut,
    has_rows,
    rows_in,
    twice,
)
from tfcluster.runtime.keras.checks.row_terms import RowTerms
from tfcluster.runtime.keras.data.loop_datasets import on_demand, serves_a_loop
from tfcluster.runtime.keras.program_lines import user_line
from tfcluster.runtime.keras.session import (
    DOUBLING_RANK,
    MOST_TRIALS,
    Session,
    TakenBatch,
)
from tfcluster.runtime.scripts import self_distributed


class GraphMirroredValue:
    """A Python value that graphs read when they run, not when they are traced."""

    def __init__(self, value: Any, dtype: Any) -> None:
        self._value, self._dtype = value, dtype
        self._variable: tf.Variable | None = None

    def read(self) -> Any:
        """The value; in a graph, a tensor that is read when the graph runs."""
        if tf.executing_eagerly():
            return self._value
        if self._variable is None:
            with tf.init_scope():
                self._variable = tf.Variable(
                    self._value, trainable=False, dtype=self._dtype
                )
        return self._variable.read_value()

    def set(self, value: Any) -> None:
        """Change the value, also for graphs that are traced already."""
        if value != self._value and self._variable is not None:
            self._variable.assign(value)
        self._value = value


class DatasetIteration:
    """The hook on ``Dataset.__iter__``, and the share of the last batch it yielded."""

    def __init__(self, session: Session, row_terms: RowTerms) -> None:
        self._session = session
        self._row_terms = row_terms
        self.counts = GraphMirroredValue(session.loop.counts, tf.bool)
        """Whether metrics count this rank's rows."""
        self.fraction = GraphMirroredValue(1.0, tf.float64)
        """This rank's fraction of the rows."""
        self.doubles = GraphMirroredValue(False, tf.bool)
        """Whether each row comes twice."""

    def install(self) -> None:
        patches.TABLE.install({patches.DATASET_ITER: self._iter})

    def yields(
        self,
        *,
        rows: float,
        total: float,
        counts: bool,
        divided: bool,
        present: float | None = None,
        trial: bool = False,
    ) -> None:
        """Record the share of the batch that the program gets now."""
        loop = self._session.loop
        loop.trials += trial
        loop.rows, loop.total = rows, total
        loop.counts, loop.divided = counts, divided
        loop.present, loop.trial = present, trial
        self.counts.set(counts)
        self.fraction.set(rows / total)
        self.doubles.set(trial and self._session.rank == DOUBLING_RANK)

    def _iter(self, original: Callable[..., Any], dataset: Any) -> Any:
        session = self._session
        if not session.divides or not serves_a_loop(session, dataset):
            return original(dataset)
        passage = DatasetPass(session, self, _batches_in(dataset))
        iterator = original(_divided(dataset, passage))
        return _watched(iterator, session, self._row_terms)


class DatasetPass:
    """One pass over a dataset by a custom loop of the program."""

    def __init__(
        self, session: Session, loops: DatasetIteration, batches: float
    ) -> None:
        self._session = session
        self._loops = loops
        self._left = batches
        self._applies: int | None = None
        self._trains = False
        self._looks = False
        """Whether it has yielded batches between which nothing was trained."""

    def next_bounds(self, batch: int) -> tuple[int, int, int]:
        """Choose the rows of the next batch: start, stop, and how many times they come.

        ``batch`` is its number of rows; a negative one means that it cannot be divided.
        """
        if self_distributed.claimed():
            return 0, max(batch, 0), 1
        applies = self._session.loop.applies
        if self._applies is not None and applies > self._applies:
            self._trains, self._looks = True, False
        self._applies = applies
        self._left -= 1
        rank, size = self._session.rank, self._session.size
        loop = self._session.loop
        if not self._trains and any(each.passage == id(self) for each in loop.taken):
            self._looks = True
            loop.taken = [each for each in loop.taken if each.passage != id(self)]
        trial = self._trains and batch > 0 and self._tries(batch)
        loop.batches += 1
        divide = trial_bounds if trial else bounds
        parts = [divide(batch, each, size) for each in range(size)]
        fractions = (
            tuple(
                Fraction(0 if trial and each == DOUBLING_RANK else stop - start, batch)
                for each, (start, stop) in enumerate(parts)
            )
            if batch > 0
            else ()
        )
        beside = [taken.fractions for taken in loop.taken]
        fits = self._fits(fractions, beside, trial=trial)
        whole = not self._trains or batch <= 0 or not fits
        if not self._looks:
            loop.taken.append(TakenBatch(id(self), None if whole else fractions))
        if whole:
            if any(beside):
                self._whole_beside(batch)
            else:
                counts = rank == 0
                self._loops.yields(rows=1.0, total=1.0, counts=counts, divided=False)
            return 0, max(batch, 0), 1
        start, stop = parts[rank]
        rows = stop - start
        times = 2 if trial and rank == DOUBLING_RANK else 1
        counted = rows if times == 1 else 0
        self._loops.yields(
            rows=float(counted),
            total=float(batch),
            counts=counted > 0,
            divided=True,
            present=float(rows * times) if trial else None,
            trial=trial,
        )
        return (start, stop, times) if rows else (0, 1, 1)

    def _fits(
        self,
        fractions: tuple[Fraction, ...],
        beside: Sequence[tuple[Fraction, ...] | None],
        *,
        trial: bool,
    ) -> bool:
        """Whether a batch can be divided, given those that share a gradient with it.

        A gradient has one weight per rank. It is correct for several batches only if a
        rank has the same fraction of each of them.
        """
        if beside or not self._session.loop.several:
            return all(other == fractions for other in beside)
        # Other batches will follow: equal fractions for all ranks fit most of them.
        counted = fractions[:DOUBLING_RANK] + fractions[DOUBLING_RANK + trial :]
        return len(set(counted)) == 1

    def _whole_beside(self, batch: int) -> None:
        """Yield a whole batch to every rank, beside the rank's part of another batch.

        The weight remains that of the part. The whole batch's term is equal on all
        ranks, so any weighted mean reproduces it.
        """
        if not self._trains:
            # The program looks at data in the middle of a step.
            self._loops.counts.set(self._session.chief)
            return
        self._session.warn(
            f"a batch of {batch} rows contributes to one gradient together with "
            "another batch, and cannot be divided among the ranks in the same "
            "proportions. Every rank computes all of it. The result is right if the "
            "loss is a sum of means, one over each batch. Use batches with equal "
            f"numbers of rows, or with multiples of {self._session.size} rows"
        )

    def _tries(self, batch: int) -> bool:
        """Whether the next batch is a trial. All batches of one gradient have to be."""
        loop = self._session.loop
        if not loop.unjudged or loop.trials >= MOST_TRIALS:
            return False
        if loop.trial and loop.batches:
            return True
        # Otherwise the first batch of the next pass, which is whole, would be part of
        # it.
        return batch >= self._session.size and loop.window <= max(self._left, 0) + 1


def _batches_in(dataset: Any) -> float:
    """How many batches of the dataset are certain to come (infinite: ``math.inf``)."""
    found = int(dataset.cardinality())
    return math.inf if found == tf.data.INFINITE_CARDINALITY else max(found, 0)


def _watched(iterator: Any, session: Session, row_terms: RowTerms) -> Any:
    """Observe the batches of ``iterator``, and settle the weights when it ends."""
    kind = type(iterator)
    loop = user_line()

    def following(self: Any) -> Any:
        row_terms.end_batch()
        try:
            batch = kind.__next__(self)
        except StopIteration:
            session.settle("end of a pass over a dataset")
            raise
        if session.loop.divided:
            row_terms.begin_batch(batch, loop)
        return batch

    # Python looks up __next__ in the class; everything else must stay the same.
    watched = type(kind.__name__, (kind,), {"__next__": following})
    patches.TABLE.replace(patches.ONE_ITERATOR_CLASS, iterator, watched)
    return iterator


def _divided(dataset: Any, passage: DatasetPass) -> Any:
    """``dataset`` with each batch sliced as ``passage`` decides at that moment."""

    def next_bounds(batch: Any) -> list[Any]:
        return [np.int64(number) for number in passage.next_bounds(int(batch))]

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def part(*element: Any) -> Any:
        leaves = [leaf for leaf in tf.nest.flatten(element) if has_rows(leaf)]
        counts = [tf.cast(rows_in(leaf), tf.int64) for leaf in leaves]
        _, common = common_rows(leaves)
        batch = tf.where(common, counts[0], tf.constant(-1, tf.int64))
        first, last, times = tf.numpy_function(next_bounds, [batch], [tf.int64] * 3)
        for number in (first, last, times):
            number.set_shape([])
        last = tf.where(common, last, tf.reduce_max(tf.stack(counts)))

        def piece(leaf: Any) -> Any:
            if not has_rows(leaf):
                return leaf
            rows = cut(leaf, first, last)
            return tf.cond(times > 1, lambda: twice(rows), lambda: rows)

        return tf.nest.map_structure(piece, _as_spec(element, dataset.element_spec))

    return on_demand(dataset.map(part))


def _as_spec(element: tuple[Any, ...], spec: Any) -> Any:
    """Join the arguments of a mapped function to the one element that they are."""
    if not isinstance(spec, tuple):
        return element[0]
    return type(spec)(*element) if hasattr(spec, "_fields") else element
