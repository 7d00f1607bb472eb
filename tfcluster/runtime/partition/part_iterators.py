"""Iterators of the program over pipelines of which ranks compute their rows only.

Such an iterator yields whole batches, like any other. Behind it is an iterator over
parts, from which divided functions take their batches instead. Where Python takes a
batch, ranks of one host gather it; elsewhere, each computes it whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import tensorflow as tf

from tfcluster.runtime.errors import CollectiveError
from tfcluster.runtime.partition import reading_ahead, tf_datasets
from tfcluster.runtime.partition.input_parts import DividedPipeline
from tfcluster.runtime.partition.placement import Shard
from tfcluster.runtime.partition.program_inputs import ProgramInput, RowPart
from tfcluster.runtime.partition.taken_batches import TakenElement
from tfcluster.runtime.partition.tf_datasets import OwnedIterator
from tfcluster.runtime.tensor_types import Dataset, Nest, Tensor


@dataclass(slots=True)
class TakenBatch:
    """An element that was taken from an iterator."""

    values: list[ProgramInput]
    """This rank's rows of its tensors, or the tensors."""
    compared: Tensor | None = None
    """What is equal if the batch is equal on all ranks; None if only ``values`` is."""
    iterator: PartIterator | None = None
    """The iterator, if it can yield parts."""
    compute_whole: Callable[[], list[Tensor]] | None = None

    def whole(self) -> list[Tensor]:
        """The tensors. This rank may have to compute the rows of others."""
        if self.compute_whole is None:
            return [value.tensor for value in self.values]
        return self.compute_whole()

    def if_it_differs(self) -> TakenBatch:
        """The whole batch, once it is clear that the ranks' are not equal."""
        if self.iterator is not None:
            self.iterator.differ()
        return TakenBatch([ProgramInput(tensor) for tensor in self.whole()])


class DividedInputs:
    """The iterators of the program behind which there are iterators over parts."""

    def __init__(self) -> None:
        self._iterators: dict[int, tuple[object, PartIterator]] = {}
        """By the ``id`` of the resource, with a reference that ends the entry."""
        self._equal: dict[int, object] = {}
        """By the ``id`` of a tensor that is equal on all ranks: a reference to it."""
        self._waiting: weakref.WeakKeyDictionary[PartIterator, set[int]]
        self._waiting = weakref.WeakKeyDictionary()
        """Passes that have not begun, with the shuffles that they draw seeds for."""

    def note_equal(self, tensors: Sequence[Tensor]) -> None:
        """Note that tensors are equal on all ranks."""
        for tensor in tensors:
            forget = partial(self._equal.pop, id(tensor))
            self._equal[id(tensor)] = weakref.ref(tensor, forget)

    def is_equal(self, tensor: Tensor) -> bool:
        """Whether a tensor is known to be equal on all ranks."""
        return id(tensor) in self._equal

    def _add(self, resource: Tensor, parts: PartIterator) -> None:
        """Let divided functions that get the iterator with ``resource`` read parts."""
        key, iterators = id(resource), self._iterators
        ends = weakref.ref(resource, lambda _: iterators.pop(key, None))
        iterators[key] = ends, parts

    def begin_pass(self, pipeline: DividedPipeline) -> Iterator[Nest]:
        """A new iterator over the whole batches of a pipeline.

        Python does not read from it, or not on all ranks.
        """
        self.begin_waiting(tf_datasets.shuffles_of(pipeline.whole))
        if not pipeline.is_divided:
            return iter(pipeline.whole)
        parts = PartIterator(pipeline)
        parts.begin()
        return self.over(parts)

    def over(self, parts: PartIterator) -> Iterator[Nest]:
        """A new iterator over the whole batches behind which there are these parts."""
        spec = parts.pipeline.whole.element_spec
        iterator = tf_datasets.late_iterator(spec, parts)
        resource = tf_datasets.resource_of(iterator)
        parts.resource = weakref.ref(resource)
        self._add(resource, parts)
        return iterator

    def over_late(self, parts: PartIterator, shuffles: set[int]) -> Iterator[Nest]:
        """The same, with a pass that waits; for ``shuffles`` it draws seeds."""
        if shuffles:
            self._waiting[parts] = shuffles
            parts.draw_at_end()
        return self.over(parts)

    def begin_waiting(self, shuffles: set[int] | None = None) -> None:
        """Begin passes that wait: those that draw seeds for these shuffles, or all.

        They will yield whole batches, since a checkpoint may still get their iterators.
        """
        for parts, others in list(self._waiting.items()):
            if shuffles is None or not shuffles.isdisjoint(others):
                del self._waiting[parts]
                parts.become_whole()

    def begin(
        self, inputs: Sequence[Tensor], fetched: Sequence[TakenElement] = ()
    ) -> None:
        """Let iterators among a function's inputs yield whole batches to it.

        Without those from which all elements are ``fetched``. Passes that wait begin
        before those over datasets among the inputs.
        """
        waits = any(parts.waits for parts in self._waiting)
        if waits and any(tensor.dtype == tf.variant for tensor in inputs):
            self.begin_waiting()
        if not self._iterators:
            return
        places = {fetch.iterator for fetch in fetched}
        for place, tensor in enumerate(inputs):
            parts = self._of(tensor)
            if parts is not None and place not in places:
                parts.begin_whole(tensor)

    def take(self, fetch: TakenElement, inputs: Sequence[Tensor]) -> TakenBatch:
        """Take an element of an iterator among a function's inputs.

        Raises OutOfRangeError at the end of the data, and what the pipeline raises.
        """
        parts = self._of(inputs[fetch.iterator])
        if parts is None:
            return TakenBatch([ProgramInput(tensor) for tensor in fetch.next(inputs)])
        return parts.take_for_program()

    def of(
        self, fetches: Sequence[TakenElement], inputs: Sequence[Tensor]
    ) -> list[PartIterator]:
        """The iterators over parts from which elements will be taken."""
        found = (self._of(inputs[fetch.iterator]) for fetch in fetches)
        return [parts for parts in found if parts is not None]

    def _of(self, resource: Tensor) -> PartIterator | None:
        entry = self._iterators.get(id(resource))
        return None if entry is None or entry[1].is_whole else entry[1]


class Loops(Protocol):
    """What iterators of the program's own loops need."""

    def next_whole(self, parts: PartIterator) -> Sequence[Tensor] | None:
        """Take the next batch for Python; None where each rank is to compute it."""

    def take_whole(self, parts: PartIterator) -> Sequence[Tensor]:
        """Take the next batch, where ranks exchange something."""

    def new_iterator(self, dataset: Dataset) -> OwnedIterator:
        """An ordinary iterator over a dataset."""


class PartIterator:
    """Yields this rank's rows of the batches of one pass.

    The pass begins when something is read, unless ``begin`` is called before. With
    ``loops``, Python reads from it; if it ``is_of_host``, each host computes the whole
    batch, and its ranks divide the rows.
    """

    def __init__(
        self,
        pipeline: DividedPipeline,
        loops: Loops | None = None,
        *,
        is_of_host: bool = False,
    ) -> None:
        self.pipeline = pipeline
        self.is_of_host = is_of_host
        self._loops = loops
        self.is_whole = False
        """Whether the program's iterator is an ordinary one."""
        self.resource: weakref.ref[Tensor] | None = None
        """That of the program's iterator."""
        self._iterator: OwnedIterator | None = None
        self._owed: Any = None
        self._differs = False
        self._yields_whole = False

    @property
    def waits(self) -> bool:
        """Whether the pass has not begun."""
        return self._iterator is None and not self.is_whole

    def begin(self) -> OwnedIterator:
        """Begin the pass, unless it has begun; returns its iterator."""
        if self._iterator is None:
            self._pay()
            self._iterator = self._new_iterator(self.pipeline.parts)
        return self._iterator

    def draw_at_end(self) -> None:
        """Let the pass draw its seeds even if it never begins."""
        assert self._loops is not None
        draw = self._loops.new_iterator
        self._owed = weakref.finalize(self, draw, self.pipeline.whole)
        self._owed.atexit = False

    def _pay(self) -> None:
        if self._owed is not None:
            self._owed.detach()

    def _new_iterator(self, dataset: Dataset) -> OwnedIterator:
        if self._loops is None:
            return tf_datasets.iterator_over(dataset)
        return self._loops.new_iterator(dataset)

    def next_whole(self) -> Sequence[Tensor] | None:
        """The next batch, for Python."""
        if self._loops is None or self.is_whole:
            return None
        return self._loops.next_whole(self)

    def begin_whole(self, resource: Tensor) -> None:
        """Let the program's iterator with this resource yield whole batches.

        Few are read so, and to begin one takes as long as to begin a pass.
        """
        if self._yields_whole or self.is_whole:
            return
        self._yields_whole = True
        tf_datasets.fill(resource, self.pipeline.whole_batches(self.begin()))

    def become_whole(self) -> None:
        """Let the program's iterator be an ordinary one, unless the pass has begun."""
        resource = None if self.resource is None else self.resource()
        if not self.waits or resource is None:
            return
        self._pay()
        self.is_whole = True
        tf_datasets.fill(resource, reading_ahead.as_read(self.pipeline.whole))

    def dataset(self) -> Dataset:
        """The dataset of an ordinary iterator. Raises CollectiveError for another."""
        if self.is_whole:
            return self.pipeline.whole
        raise CollectiveError(
            "an iterator is saved in a checkpoint, or restored, but each rank has read "
            "its own rows of the batches. Create the tf.train.Checkpoint that contains "
            "the iterator before the first batch is taken from it: then every rank "
            "reads whole batches"
        )

    def take_for_program(self) -> TakenBatch:
        """The next batch, for a function that ranks divide; see ``take``."""
        if self._loops is None or not self.is_of_host:
            return self.take()
        return TakenBatch(list(map(ProgramInput, self._loops.take_whole(self))))

    def take(self) -> TakenBatch:
        """The next batch.

        Raises OutOfRangeError at the end, and what the functions of its rows raise;
        then the next call returns the batch after that.
        """
        pipeline = self.pipeline
        *own, records = self.begin().get_next()
        elements, checksum = pipeline.read(records)
        rows = int(elements[0].shape[0])

        def compute_whole() -> list[Tensor]:
            return pipeline.compute_whole(elements)

        if self._differs:
            whole = [ProgramInput(tensor) for tensor in compute_whole()]
            return TakenBatch(whole, iterator=self)
        compared = pipeline.compared(checksum, compute_whole)
        batch = TakenBatch([], compared, self, compute_whole)
        if pipeline.can_divide[rows]:
            batch.values = [ProgramInput(tensor, _part(tensor, rows)) for tensor in own]
        else:
            batch.values = [ProgramInput(tensor) for tensor in compute_whole()]
        return batch

    def differ(self) -> None:
        """Yield whole batches from now on, since those of the ranks are not equal.

        Later passes are not divided.
        """
        self._differs = True
        self.pipeline.is_divided = False


def _part(own: Tensor, rows: int) -> RowPart:
    return RowPart(Shard(0, rows), (rows, *own.shape[1:]))
