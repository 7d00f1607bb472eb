"""Round-robin sharding by batches: rank r of N gets batches r, r+N, r+2N, ...

This is for ranks that do not wait for each other. All ranks read the data in the same
order.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime import tf_internals, tf_patches
from tfcluster.runtime.exchange.graph_ops import unconverted
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.training_session import TrainingSession
from tfcluster.runtime.keras.types import EpochIterator
from tfcluster.runtime.tensor_types import Dataset, Nest, Tensor

IS_SHARDED = "_tfcluster_sharded"
"""Set on a Keras iterator whose batches go to this rank alone."""

YIELDS_BATCHES = "_tfcluster_yields_batches"
"""Set on our own datasets, whose class names do not show whether they yield batches."""


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """Describes which batches belong to one rank."""

    rank: int
    size: int

    def count(self, batches: int) -> int:
        """The number of batches that belong to this rank, out of ``batches``."""
        return max(0, -(-(batches - self.rank) // self.size))

    def takes(self, number: int) -> bool:
        """Whether batch ``number``, counted from 0, belongs to this rank."""
        return number % self.size == self.rank

    def stand_in(self, batches: int) -> ShardSpec:
        """The spec of another rank, if there are too few batches for this one.

        ``batches`` is 1 or more.
        """
        return ShardSpec(self.rank % batches, batches)


class FitBatches:
    """Shards the batches of ``fit``.

    ``set_idle`` is called with True if no batch of the epoch belongs to this rank, and
    with False when the training ends.
    """

    def __init__(
        self,
        session: TrainingSession,
        shard: ShardSpec,
        set_idle: Callable[[bool], None],
    ) -> None:
        self._session = session
        self._shard = shard
        self._set_idle = set_idle
        self._sharding: int | None = None
        """The thread whose next iterator is to be sharded."""

    def install(self) -> None:
        """Install the hook in Keras, once per process."""
        patches.TABLE.install({patches.EPOCH_ITERATOR: self._begin})

    @contextmanager
    def sharding_next_iterator(self) -> Iterator[None]:
        """Shard the next iterator of Keras that this thread creates, for training."""
        self._sharding = threading.get_ident()
        try:
            yield
        finally:
            self._sharding = None
            self._set_idle(False)

    def _begin(
        self,
        original: Callable[..., None],
        iterator: EpochIterator,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        original(iterator, *args, **kwargs)
        if self._sharding != threading.get_ident():
            return
        self._sharding = None
        if not self._session.divides or getattr(iterator, IS_SHARDED, False):
            return
        shard, batches = self._shard, _batches_per_epoch(iterator)
        if batches and shard.count(batches) == 0:
            shard = shard.stand_in(batches)
            self._set_idle(True)
        _shard_epochs(iterator, shard)


def _batches_per_epoch(iterator: EpochIterator) -> int | None:
    """The number of batches per epoch, or None if unknown."""
    batches = internals.steps_of(iterator) or internals.batches_of_data(iterator)
    return int(batches) if batches else None


def _shard_epochs(iterator: EpochIterator, shard: ShardSpec) -> None:
    dataset = internals.dataset_of(iterator).shard(shard.size, shard.rank)
    internals.set_dataset(iterator, dataset)
    if steps := internals.steps_of(iterator):
        internals.set_steps(iterator, shard.count(steps))

    whole = internals.batches_of_data(iterator)
    if whole:
        count = shard.count(whole)
        counted = internals.counted(type(iterator), count)
        patches.TABLE.replace(patches.ONE_EPOCH_ITERATOR_CLASS, iterator, counted)


class LoopBatches:
    """Shards the batches of custom loops over a ``tf.data.Dataset``.

    A dataset counts as training data once a gradient has been applied between two of
    its batches. Its first batch goes to every rank, and in later passes to one rank.
    """

    def __init__(self, session: TrainingSession, shard: ShardSpec) -> None:
        self._session = session
        self._shard = shard
        self._trained: weakref.WeakSet[Dataset] = weakref.WeakSet()
        self._iterators: weakref.WeakSet[Iterator[Nest]] = weakref.WeakSet()
        self._ended = False
        """Whether a pass has begun since the last ``take_ended``."""
        self.divides_now = False
        """Whether the last batch of a loop went to this rank alone."""

    def take_ended(self) -> bool:
        """Whether the program has left all loops since this last returned True.

        A loop has been left when its iterator no longer exists.
        """
        if self._iterators or not self._ended:
            return False
        self._ended = False
        return True

    def install(self) -> None:
        """Install the hook in TensorFlow, once per process."""
        tf_patches.TABLE.install({tf_patches.DATASET_ITER: self._iter})

    def _iter(
        self, original: Callable[[Dataset], Iterator[Nest]], dataset: Dataset
    ) -> Iterator[Nest]:
        session = self._session
        if not session.divides or not serves_a_loop(session, dataset):
            return original(dataset)
        iterator = original(_filtered(dataset, self._next_pass(dataset)))
        self._iterators.add(iterator)
        self._ended = True
        return iterator

    def _next_pass(self, dataset: Dataset) -> Callable[[np.int64], np.bool_]:
        """A function that says whether this rank gets batch ``number`` of one pass."""
        session, shard = self._session, self._shard
        applies: list[int] = []

        def takes(number: np.int64) -> np.bool_:
            if applies and session.applies > applies[0]:
                self._trained.add(dataset)
            applies[:] = [session.applies]
            self.divides_now = trains = dataset in self._trained
            return np.bool_(not trains or shard.takes(int(number)))

        return takes


def serves_a_loop(session: TrainingSession, dataset: Dataset) -> bool:
    """Whether an iterator that is created now yields batches to a loop of the program.

    Iterators that Keras's methods create, iterators in graphs, and datasets of single
    rows do not.
    """
    return (
        not session.inside_keras and tf.executing_eagerly() and yields_batches(dataset)
    )


def yields_batches(dataset: Dataset) -> bool:
    """Whether the elements of a dataset are certainly batches."""
    if getattr(dataset, YIELDS_BATCHES, False):
        return True
    kind = tf_internals.kind_of(dataset)
    if kind in tf_internals.BATCHES:
        return True
    inputs = tf_internals.inputs_of(dataset)
    return (
        kind in tf_internals.KEEPS_BATCHES
        and bool(inputs)
        and all(yields_batches(source) for source in inputs)
    )


def _filtered(dataset: Dataset, takes: Callable[[np.int64], np.bool_]) -> Dataset:
    """The batches of ``dataset`` that ``takes`` accepts.

    ``takes`` is called in the order of the batches, when each batch is requested.
    """

    @unconverted
    def is_taken(number: Tensor, *element: Nest) -> Tensor:
        taken: Tensor = tf.numpy_function(takes, [number], tf.bool)
        taken.set_shape([])
        return taken

    @unconverted
    def without_number(number: Tensor, element: Nest) -> Nest:
        return element

    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    options.experimental_optimization.map_parallelization = False
    filtered = dataset.enumerate().filter(is_taken).map(without_number)
    return filtered.with_options(options)
