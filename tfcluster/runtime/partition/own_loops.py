"""Loops of the program over datasets, whose input pipelines ranks of a host divide.

Each rank computes its rows of a batch, and the ranks of a host exchange them, through
memory that they share: Python gets whole batches. Between hosts it may take longer to
exchange a batch than to compute it, so each host computes all of it.

A pass begins when something is read from its iterator, or when another pass begins that
may have an effect on it: passes over a shuffled dataset draw their seeds in the order
in which they begin. Until then, the iterator can become one that a checkpoint saves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfcluster.runtime import contract, tf_internals
from tfcluster.runtime.collective import Group, Signature, tensor_words
from tfcluster.runtime.collective.transports.hierarchical import HostTransport
from tfcluster.runtime.partition import tf_datasets
from tfcluster.runtime.partition.agreement import Agree
from tfcluster.runtime.partition.hook import Hook, Together
from tfcluster.runtime.partition.input_parts import DividedPipeline
from tfcluster.runtime.partition.input_pipelines import BatchPipeline, divided
from tfcluster.runtime.partition.part_iterators import (
    DividedInputs,
    PartIterator,
    TakenBatch,
    failing,
)
from tfcluster.runtime.partition.placement import Split
from tfcluster.runtime.partition.program_inputs import ProgramInput
from tfcluster.runtime.partition.tf_datasets import OwnedIterator
from tfcluster.runtime.tensor_types import Dataset, Nest, Tensor

_DIVIDED = "_tfcluster_divided"
_NEXT = "the next batch of a loop"


class OwnLoops:
    """Creates the iterators of such loops: see ``part_iterators.Loops``.

    Where ``is_of_program()`` is false, it is not a loop of the program, on all ranks,
    that iterates. ``together``: see ``hook.Together``. ``exchanged`` is called when
    ranks have divided a batch.
    """

    def __init__(
        self,
        group: Group,
        inputs: DividedInputs,
        hook: Hook,
        *,
        agree: Agree,
        together: Together,
        is_of_program: Callable[[], bool],
        exchanged: Callable[[], None],
    ) -> None:
        self._group = group
        self._inputs = inputs
        self._hook = hook
        self._agree = agree
        self._together = together
        self._is_of_program = is_of_program
        self._exchanged = exchanged
        self._split: Split | None = None
        """This rank's rows, of those of its host's ranks; None if it is not known."""
        self._waiting: weakref.WeakKeyDictionary[PartIterator, set[int]]
        self._waiting = weakref.WeakKeyDictionary()
        """Passes that have not begun, with the shuffled datasets that they read."""
        self._stands_aside = False

    def iterate(
        self, original: Callable[[Dataset], Iterator[Nest]], dataset: Dataset
    ) -> Iterator[Nest]:
        """A new iterator over a dataset; ``original`` makes an ordinary one."""
        if self._stands_aside:
            return original(dataset)
        shuffled = _shuffled(dataset)
        for parts, others in list(self._waiting.items()):
            if not shuffled.isdisjoint(others):
                del self._waiting[parts]
                parts.begin()
        pipeline = self._divided(dataset)
        if pipeline is None or not pipeline.is_divided:
            return original(dataset)
        is_of_host = pipeline.split.size < self._group.size
        parts = PartIterator(pipeline, self, is_of_host=is_of_host)
        self._waiting[parts] = shuffled
        return self._inputs.over(parts)

    def new_iterator(self, dataset: Dataset) -> OwnedIterator:
        """See ``Loops``."""
        self._stands_aside = True
        try:
            return tf_datasets.iterator_over(dataset)
        finally:
            self._stands_aside = False

    def next_whole(self, parts: PartIterator) -> Sequence[Tensor] | None:
        """See ``Loops``."""
        if not self._is_of_program():
            return None
        with self._hook.entering() as enters:
            return self.take_whole(parts) if enters else None

    def take_whole(self, parts: PartIterator) -> Sequence[Tensor]:
        """The next batch of all ranks.

        Raises OutOfRangeError at the end of the data, and what the pipeline raises on
        any rank.
        """
        ended: tf.errors.OutOfRangeError | None = None
        with failing([parts]), self._together(_NEXT):
            try:
                batch = parts.take()
            except tf.errors.OutOfRangeError as error:
                ended = error
            else:
                batch = self._agreed(batch)
        if ended is not None:
            raise ended
        self._exchanged()
        return self._gathered(batch.values)

    def _agreed(self, batch: TakenBatch) -> TakenBatch:
        """The batch with which all ranks continue: this rank's, or the chief's."""
        if batch.compared is not None:
            (same,) = self._agree(_NEXT, [batch.compared], (), ())
            if same is batch.compared:
                return batch
            batch = batch.if_it_differs()
        whole = [value.tensor for value in batch.values]
        return TakenBatch(list(map(ProgramInput, self._agree(_NEXT, whole, (), ()))))

    def _gathered(self, values: Sequence[ProgramInput]) -> list[Tensor]:
        """The whole tensors of a batch that is equal on all ranks."""
        words = [
            tensor_words(f"tensor {place}", value.tensor.dtype.name, value.shape)
            for place, value in enumerate(values)
            if value.part is not None
        ]
        if not words:
            return [value.tensor for value in values]
        with self._group.exchange(Signature("rows of a batch", tuple(words))) as call:
            return [self._whole(call.transport, value) for value in values]

    def _whole(self, transport: HostTransport, value: ProgramInput) -> Tensor:
        if value.part is None:
            return value.tensor
        assert self._split is not None
        own, rows = np.asarray(value.tensor), value.part.shard.rows
        whole = np.empty((rows, *own.shape[1:]), own.dtype)
        if whole.nbytes:
            row_nbytes, size = whole.nbytes // rows, self._split.size
            firsts = [rank * rows // size for rank in range(size + 1)]
            data = whole.reshape(-1).view(np.uint8)
            start = firsts[self._split.rank] * row_nbytes
            data[start : start + own.nbytes] = own.reshape(-1).view(np.uint8)
            transport.allgather_on_host(data, [row_nbytes * row for row in firsts])
        with tf.device("CPU:0"):
            return tf.convert_to_tensor(whole)

    def _divided(self, dataset: Dataset) -> DividedPipeline | None:
        if not self._is_of_program():
            return None
        # An attribute of the dataset, so that both end together.
        if not hasattr(dataset, _DIVIDED):
            contract.mark(dataset, _DIVIDED, self._divide(dataset))
        pipeline: DividedPipeline | None = getattr(dataset, _DIVIDED)
        return pipeline

    def _divide(self, dataset: Dataset) -> DividedPipeline | None:
        group = self._group
        pipeline = divided(dataset, Split(group.rank, group.size))
        if isinstance(pipeline, str):
            return None
        if self._split is None:
            with group.exchange(Signature("which ranks share a host")) as call:
                ranks = call.transport.host_ranks
            self._split = Split(ranks.index(group.rank), len(ranks))
        if self._split.size == 1:
            return None
        if self._split.size < group.size:
            pipeline = divided(dataset, self._split)
            assert isinstance(pipeline, BatchPipeline)
        return DividedPipeline(pipeline, self._split)


def _shuffled(dataset: Dataset) -> set[int]:
    """The shuffled datasets among those that a dataset reads, by their ``id``."""
    found = set()
    for source in tf_internals.inputs_of(dataset):
        found |= _shuffled(source)
    if "Shuffle" in tf_internals.kind_of(dataset):
        found.add(id(dataset))
    return found
