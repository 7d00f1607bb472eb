"""Loops of the program over datasets, whose input pipelines ranks of one host divide.

Each rank computes its rows of a batch, and the ranks exchange them, through memory that
they share: Python gets whole batches. Between hosts it may take longer to exchange a
batch than to compute it.

A pass begins when something is read from its iterator, or when another pass begins that
may have an effect on it: passes over a shuffled dataset draw their seeds in the order
in which they begin. Until then, the iterator can become one that a checkpoint saves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

from tfcluster.runtime import contract, tf_internals
from tfcluster.runtime.partition import tf_datasets
from tfcluster.runtime.partition.input_parts import DividedPipeline
from tfcluster.runtime.partition.part_iterators import (
    DividedInputs,
    NextWhole,
    PartIterator,
)
from tfcluster.runtime.partition.tf_datasets import OwnedIterator
from tfcluster.runtime.tensor_types import Dataset, Nest

_DIVIDED = "_tfcluster_divided"


class OwnLoops:
    """Creates the iterators of such loops.

    ``divide`` returns the divided pipeline of a dataset, if there is one, unless it is
    not a loop of the program that iterates over it.
    """

    def __init__(
        self,
        inputs: DividedInputs,
        divide: Callable[[Dataset], DividedPipeline | None],
        next_whole: NextWhole,
    ) -> None:
        self._inputs = inputs
        self._divide = divide
        self._next_whole = next_whole
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
        parts = PartIterator(pipeline, self._next_whole, self._ordinary)
        self._waiting[parts] = shuffled
        return self._inputs.over(parts)

    def _ordinary(self, dataset: Dataset) -> OwnedIterator:
        self._stands_aside = True
        try:
            return tf_datasets.iterator_over(dataset)
        finally:
            self._stands_aside = False

    def _divided(self, dataset: Dataset) -> DividedPipeline | None:
        # An attribute of the dataset, so that both end together.
        if not hasattr(dataset, _DIVIDED):
            contract.mark(dataset, _DIVIDED, self._divide(dataset))
        pipeline: DividedPipeline | None = getattr(dataset, _DIVIDED)
        return pipeline


def _shuffled(dataset: Dataset) -> set[int]:
    """The shuffled datasets among those that a dataset reads, by their ``id``."""
    found = set()
    for source in tf_internals.inputs_of(dataset):
        found |= _shuffled(source)
    if "Shuffle" in tf_internals.kind_of(dataset):
        found.add(id(dataset))
    return found
