"""Divides the batches of custom training loops over a ``tf.data.Dataset``.

A loop counts as a training loop once a gradient has been applied between two of its
batches. From then on the iterator yields only this rank's rows. So every rank computes
the whole first batch, and loops that only inspect data or predict see all data. Loops
that get numpy arrays also see all data: nothing shows what they compute from the rows.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import tensorflow as tf

from tfcluster.runtime import tf_patches
from tfcluster.runtime.keras.batches.batch_sharding import bounds, trial_bounds
from tfcluster.runtime.keras.batches.batch_slicing import (
    common_rows,
    has_rows,
    rows_in,
    slice_rows,
    twice,
)
from tfcluster.runtime.keras.checks.program_arrays import ProgramArrays
from tfcluster.runtime.keras.checks.row_terms import RowTerms
from tfcluster.runtime.keras.data.graph_share import GraphShare
from tfcluster.runtime.keras.data.loop_datasets import on_demand, serves_a_loop
from tfcluster.runtime.keras.graph_order import in_order
from tfcluster.runtime.keras.program_lines import caller, user_line
from tfcluster.runtime.keras.session import (
    MOST_TRIALS,
    TRIAL_RANK,
    Session,
    Share,
    TakenBatch,
)
from tfcluster.runtime.scripts import program_kind
from tfcluster.runtime.tensor_types import (
    Dataset,
    Leaf,
    Nest,
)

_AS_NUMPY = "as_numpy_iterator"
_READS_AS_NUMPY = "tensorflow_datasets"
"""The package whose loops over datasets (``as_numpy``) yield arrays to the program."""


class DatasetIteration:
    """The hooks on datasets and iterators, and the share of the last batch."""

    def __init__(
        self,
        session: Session,
        row_terms: RowTerms,
        arrays: ProgramArrays,
    ) -> None:
        self._session = session
        self._row_terms = row_terms
        self._arrays = arrays
        self._undivided = Share.undivided_batch(counts=session.loop.share.counts)
        """The share of data that every rank computes as a whole."""
        self.trained = GraphShare(self._undivided)
        """This rank's share of the batch that it trains on."""
        self.seen = GraphShare(self._undivided)
        """This rank's share of the rows that metrics get now."""
        self._weighted = GraphShare(self._undivided)
        """This rank's share of the last batch, also after its pass has ended."""
        session.graph_loop_share = self._weighted.read
        self._passes = 0
        self._pass = 0
        """The pass that has yielded the last batch, as long as it has not ended."""

    def new_number(self) -> int:
        """A number for a pass, from 1.

        The object's address would not do: on some ranks, Python may reuse it while the
        first pass's batches still count.
        """
        self._passes += 1
        return self._passes

    def install(self) -> None:
        """Install the hooks in TensorFlow, once per process."""
        tf_patches.TABLE.install(
            {
                tf_patches.DATASET_ITER: self._iter,
                **dict.fromkeys(tf_patches.ITERATOR_NEXT, self._element),
                tf_patches.DATASET_AS_NUMPY: self._as_numpy,
            }
        )

    def yields(self, share: Share, dataset_pass: int) -> None:
        """Record the share of the batch that the program gets now."""
        loop = self._session.loop
        loop.trials += int(share.trial)
        loop.share = share
        self._weighted.set(share)
        self._pass = dataset_pass
        self._takes_part()

    def count_whole_batch(self) -> None:
        """Make metrics count a batch that every rank gets as a whole, not a part."""
        self.seen.set(self._undivided)

    def ended(self, dataset_pass: int) -> None:
        """Record that a pass has ended: the current one, or one nested in its loop.

        Gradients keep the share of the last batch: a program may add them up, and apply
        them after its loop.
        """
        # Python may release an iterator at any time, even while a graph is traced.
        with tf.init_scope():
            if self._pass == dataset_pass:
                self._pass = 0
                self._session.loop.in_pass = False
                self.count_whole_batch()
                self.trained.set(self._undivided)
            elif self._pass:
                self._takes_part()

    def _takes_part(self) -> None:
        """Make metrics and layers use the share of the last batch."""
        loop = self._session.loop
        loop.in_pass = True
        self.trained.set(loop.share)
        self.seen.set(loop.share)

    def _iter(
        self, original: Callable[[Dataset], Iterator[Nest]], dataset: Dataset
    ) -> Iterator[Nest]:
        session = self._session
        if not session.divides or not serves_a_loop(session, dataset):
            return original(dataset)
        dataset_pass = DatasetPass(
            session, self, _batches_in(dataset), divides=not self._yields_arrays()
        )
        iterator = original(_divided(dataset, dataset_pass))
        checks = self._row_terms, self._arrays
        return _watched(iterator, session, *checks, dataset_pass)

    def _element(
        self, original: Callable[[Iterator[Nest]], Nest], iterator: Iterator[Nest]
    ) -> Nest:
        """Get the next batch; a graph gets it in program order.

        Getting a batch sets the shares, and ``DatasetPass`` has to know whether the
        program has trained on the last batch. TensorFlow does not see this, and would
        run the op at any time before the batch's rows are needed.
        """
        session = self._session
        if tf.executing_eagerly() or session.inside_keras or not session.divides:
            return original(iterator)
        shares = (self.trained, self.seen, self._weighted)
        with in_order() as done:
            with tf.control_dependencies([share.mark() for share in shares]):
                element = original(iterator)
            leaves = tf.nest.flatten(element, expand_composites=True)
            with tf.control_dependencies(leaves):
                done += [share.mark() for share in shares]
        return element

    def _as_numpy(
        self, original: Callable[[Dataset], Iterator[Nest]], dataset: Dataset
    ) -> Iterator[Nest]:
        with self._session.once(_AS_NUMPY):
            return original(dataset)

    def _yields_arrays(self) -> bool:
        """Whether the iterator that is being created is read as numpy arrays."""
        frame = caller()
        name = "" if frame is None else str(frame.f_globals.get("__name__"))
        return (
            self._session.within(_AS_NUMPY) or name.partition(".")[0] == _READS_AS_NUMPY
        )


class DatasetPass:
    """One pass over a dataset by a custom loop of the program.

    ``batches`` is the number of batches that are certain to come, or ``math.inf``.
    Without ``divides``, every rank gets all rows of each batch.
    """

    def __init__(
        self,
        session: Session,
        loops: DatasetIteration,
        batches: float,
        *,
        divides: bool = True,
    ) -> None:
        self._session = session
        self._loops = loops
        self._number = loops.new_number()
        self._left = batches
        self._divides = divides
        self._applies: int | None = None
        self._trains = False
        self._inspects_only = False
        """Whether the pass has yielded batches between which nothing was trained."""

    def end(self) -> None:
        """End the pass: the program has got all batches, or has left its loop."""
        self._loops.ended(self._number)

    def next_bounds(self, batch: int, *, divisible: bool) -> tuple[int, int, int]:
        """Choose the rows of the next batch: start, stop, and how often each is used.

        ``batch`` is the number of rows of the batch's first tensor. ``divisible`` says
        that all of its tensors have as many rows, so that it can be divided.
        """
        if program_kind.distributes_itself():
            return 0, batch, 1
        applies = self._session.loop.applies
        if self._applies is not None and applies > self._applies:
            self._trains, self._inspects_only = True, False
        self._applies = applies
        self._left -= 1
        rank, size = self._session.rank, self._session.size
        loop = self._session.loop
        number = self._number
        mine = [each for each in loop.taken if each.dataset_pass == number]
        if mine and not self._trains:
            self._inspects_only = True
            loop.taken = [each for each in loop.taken if each not in mine]
        divisible = divisible and batch > 0 and self._divides
        trial = self._trains and divisible and self._tries(batch)
        loop.batches += 1
        loop.whole_rows = batch
        divide = trial_bounds if trial else bounds
        parts = [divide(batch, each, size) for each in range(size)]
        fractions = (
            tuple(
                Fraction(0 if trial and each == TRIAL_RANK else stop - start, batch)
                for each, (start, stop) in enumerate(parts)
            )
            if divisible
            else ()
        )
        others = [taken.fractions for taken in loop.taken]
        fits = self._fits(fractions, others, trial=trial)
        whole = not self._trains or not divisible or not fits
        if not self._inspects_only:
            loop.taken.append(TakenBatch(number, None if whole else fractions))
        if whole:
            if any(others):
                self._yield_whole(batch)
            else:
                self._loops.yields(Share.undivided_batch(counts=rank == 0), number)
            return 0, batch, 1
        start, stop = parts[rank]
        rows = stop - start
        times = 2 if trial and rank == TRIAL_RANK else 1
        counted = rows if times == 1 else 0
        share = Share(
            rows=float(counted),
            counts=counted > 0,
            total=float(batch),
            trial=trial,
            uncounted=float(rows * times - counted),
            first=start,
        )
        self._loops.yields(share, number)
        return (start, stop, times) if rows else (0, 1, 1)

    def _fits(
        self,
        fractions: tuple[Fraction, ...],
        others: Sequence[tuple[Fraction, ...] | None],
        *,
        trial: bool,
    ) -> bool:
        """Whether a batch can be divided, given the batches that share its gradient.

        A gradient has one weight per rank. It is correct for several batches only if a
        rank has the same fraction of each of them.
        """
        if others or not self._session.loop.several:
            return all(other == fractions for other in others)
        # More batches may contribute to this gradient; equal fractions on all ranks
        # suit most of them.
        counted = fractions[:TRIAL_RANK] + fractions[TRIAL_RANK + trial :]
        return len(set(counted)) == 1

    def _yield_whole(self, batch: int) -> None:
        """Yield a whole batch to every rank, in addition to its part of another batch.

        The weight of the part remains. The whole batch's term is equal on all ranks, so
        any weighted mean reproduces it.
        """
        loop = self._session.loop
        if not self._trains:
            if not loop.in_pass:
                # The other batch's loop is over, perhaps because the program has caught
                # an exception. Gradients of whole batches cannot be judged.
                loop.share = replace(loop.share, trial=False)
            # Otherwise the program looks at data in the middle of a step.
            self._loops.count_whole_batch()
            return
        self._session.warn(
            f"a batch of {batch} rows contributes to one gradient together with "
            "another batch, and cannot be divided among the ranks in the same "
            "proportions. Every rank computes all of it. The result is right if the "
            "loss is a sum of means, one over each batch. Use batches with equal "
            f"numbers of rows, or with multiples of {self._session.size} rows"
        )

    def _tries(self, batch: int) -> bool:
        """Whether the next batch is a trial; all batches of a gradient must agree."""
        loop = self._session.loop
        if not loop.unjudged or loop.trials >= MOST_TRIALS:
            return False
        if loop.share.trial and loop.batches:
            return True
        # Otherwise the first batch of the next pass, which is whole, would be part of
        # the trial.
        return batch >= self._session.size and loop.window <= max(self._left, 0) + 1


def _batches_in(dataset: Dataset) -> float:
    """The number of batches that the dataset is certain to have, or ``math.inf``."""
    found = int(dataset.cardinality())
    return math.inf if found == tf.data.INFINITE_CARDINALITY else max(found, 0)


def _watched(
    iterator: Iterator[Nest],
    session: Session,
    row_terms: RowTerms,
    arrays: ProgramArrays,
    dataset_pass: DatasetPass,
) -> Iterator[Nest]:
    """Observe the batches of ``iterator``, and settle the weights when it ends."""
    kind = type(iterator)
    loop = user_line()
    # A loop that the program leaves early releases its iterator.
    weakref.finalize(iterator, dataset_pass.end).atexit = False

    def following(self: Iterator[Nest]) -> Nest:
        row_terms.end_batch()
        try:
            batch = kind.__next__(self)
        except StopIteration:
            session.settle("end of a pass over a dataset")
            dataset_pass.end()
            raise
        if session.loop.divided:
            row_terms.begin_batch(batch, loop)
        arrays.begin_batch(batch)
        return batch

    # Python looks up __next__ in the class; everything else must stay the same.
    watched = type(kind.__name__, (kind,), {"__next__": following})
    tf_patches.TABLE.replace(tf_patches.ONE_ITERATOR_CLASS, iterator, watched)
    return iterator


def _divided(dataset: Dataset, dataset_pass: DatasetPass) -> Dataset:
    """``dataset`` with each batch sliced as ``dataset_pass`` decides at that moment."""

    def next_bounds(batch: np.int64, divisible: np.bool_) -> list[np.int64]:
        found = dataset_pass.next_bounds(int(batch), divisible=bool(divisible))
        return [np.int64(number) for number in found]

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def part(*element: Nest) -> Nest:
        leaves = [leaf for leaf in tf.nest.flatten(element) if has_rows(leaf)]
        counts = [tf.cast(rows_in(leaf), tf.int64) for leaf in leaves]
        _, common = common_rows(leaves)
        first, last, times = tf.numpy_function(
            next_bounds, [counts[0], common], [tf.int64] * 3
        )
        for number in (first, last, times):
            number.set_shape([])
        last = tf.where(common, last, tf.reduce_max(tf.stack(counts)))

        def piece(leaf: Leaf) -> Leaf:
            if not has_rows(leaf):
                return leaf
            rows = slice_rows(leaf, first, last)
            return tf.cond(times > 1, lambda: twice(rows), lambda: rows)

        return tf.nest.map_structure(piece, _as_spec(element, dataset.element_spec))

    return on_demand(dataset.map(part))


def _as_spec(element: tuple[Nest, ...], spec: Nest) -> Nest:
    """The element whose components a mapped function got as its arguments."""
    if not isinstance(spec, tuple):
        return element[0]
    # A namedtuple's class takes its fields as separate arguments.
    kind: Callable[..., Nest] = type(spec)
    return kind(*element) if hasattr(spec, "_fields") else element
