"""Loops of the program over datasets, whose input pipelines ranks of a host divide.

Each rank computes its rows of a batch, and the ranks of a host exchange them, through
memory that they share: Python gets whole batches. Between hosts it may take longer to
exchange a batch than to compute it, so each host computes all of it.

A pass begins when something is read from its iterator. Until then, the iterator may get
into a checkpoint: it becomes an ordinary one, over whole batches. It also does so when
another pass begins that may draw seeds for the same shuffle: all draw them from one
generator, in the order in which iterators are made.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import tensorflow as tf

from tfcluster.runtime import contract
from tfcluster.runtime.collective import Group, Signature
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
)
from tfcluster.runtime.partition.placement import Split
from tfcluster.runtime.partition.program_inputs import ProgramInput
from tfcluster.runtime.partition.tf_datasets import OwnedIterator
from tfcluster.runtime.tensor_types import Array, Dataset, Nest, Tensor

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
        self._ranks: tuple[int, ...] = ()
        """The ranks of this host; empty if they are not known."""
        self._stands_aside = False

    def iterate(
        self, original: Callable[[Dataset], Iterator[Nest]], dataset: Dataset
    ) -> Iterator[Nest]:
        """A new iterator over a dataset; ``original`` makes an ordinary one."""
        if self._stands_aside:
            return original(dataset)
        shuffles = tf_datasets.shuffles_of(dataset)
        self._inputs.begin_waiting(shuffles)
        pipeline = self._divided(dataset)
        if pipeline is None or not pipeline.is_divided:
            return original(dataset)
        is_of_host = pipeline.split.size < self._group.size
        parts = PartIterator(pipeline, self, is_of_host=is_of_host)
        return self._inputs.over_late(parts, shuffles)

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
        with self._together(_NEXT):
            try:
                batch = parts.take()
            except tf.errors.OutOfRangeError as error:
                ended = error
            else:
                whole = self._agreed(batch)
        if ended is not None:
            raise ended
        self._exchanged()
        self._inputs.note_equal(whole)
        return whole

    def _agreed(self, batch: TakenBatch) -> list[Tensor]:
        """The whole batch with which all ranks continue: this rank's, or the chief's.

        In the exchange in which ranks find that they have the same, they gather it.
        """
        values = batch.values
        if batch.compared is not None:
            small = _small(values)
            note = struct.pack("<I", zlib.crc32(np.asarray(batch.compared).tobytes()))
            data = b"".join(
                np.asarray(value.tensor).tobytes() for value in small.values()
            )
            with self._group.exchange(Signature(_NEXT), note, data) as call:
                if len(set(call.notes)) == 1:
                    joined = self._joined(list(small.values()), call.data)
                    found = dict(zip(small, joined, strict=True))
                    return [
                        found[place]
                        if place in found
                        else self._whole(value, call.transport)
                        for place, value in enumerate(values)
                    ]
            values = batch.if_it_differs().values
        return self._agree(_NEXT, [value.tensor for value in values], (), ())

    def _whole(self, value: ProgramInput, transport: HostTransport) -> Tensor:
        """The whole tensor, if each rank of this host has its rows."""
        if value.part is None:
            return value.tensor
        own, rows = np.asarray(value.tensor), value.shape[0] or 0
        whole = np.empty((rows, *own.shape[1:]), own.dtype)
        row_nbytes = whole.nbytes // rows
        bounds = [row_nbytes * first for first in self._firsts(rows)]
        start = bounds[self._ranks.index(self._group.rank)]
        data = whole.reshape(-1).view(np.uint8)
        data[start : start + own.nbytes] = own.reshape(-1).view(np.uint8)
        transport.allgather_on_host(data, bounds)
        return _on_cpu(whole)

    def _joined(
        self, values: Sequence[ProgramInput], data: Sequence[memoryview]
    ) -> Iterator[Tensor]:
        """Tensors, of all of which each rank has sent its rows."""
        starts = dict.fromkeys(self._ranks, 0)
        for value in values:
            shape, dtype = value.tensor.shape[1:], value.tensor.dtype.as_numpy_dtype
            firsts = self._firsts(value.shape[0] or 0)
            parts = []
            for rank, (first, end) in zip(self._ranks, pairwise(firsts), strict=True):
                count = (end - first) * math.prod(shape)
                flat = np.frombuffer(data[rank], dtype, count, starts[rank])
                starts[rank] += flat.nbytes
                parts.append(flat.reshape((end - first, *shape)))
            yield _on_cpu(np.concatenate(parts))

    def _firsts(self, rows: int) -> list[int]:
        """The first rows of this host's ranks, and the number of rows."""
        size = len(self._ranks)
        return [rank * rows // size for rank in range(size + 1)]

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
        if not self._ranks:
            with group.exchange(Signature("which ranks share a host")) as call:
                self._ranks = call.transport.host_ranks
        ranks = self._ranks
        if len(ranks) == 1:
            return None
        split = Split(ranks.index(group.rank), len(ranks))
        if split.size < group.size:
            pipeline = divided(dataset, split)
            assert isinstance(pipeline, BatchPipeline)
        return DividedPipeline(pipeline, split)


_SMALL_BYTES = 1 << 11
"""The most bytes of all ranks' rows that they send with the head of an exchange."""


def _small(values: Sequence[ProgramInput]) -> dict[int, ProgramInput]:
    """Those parts, by their places, that ranks send with the head of an exchange."""
    small: dict[int, ProgramInput] = {}
    nbytes = 0
    for place, value in enumerate(values):
        elements = math.prod(size or 0 for size in value.shape)
        nbytes_of_value = elements * value.tensor.dtype.size
        if value.part is not None and nbytes + nbytes_of_value <= _SMALL_BYTES:
            nbytes += nbytes_of_value
            small[place] = value
    return small


def _on_cpu(array: Array) -> Tensor:
    with tf.device("CPU:0"):
        return tf.convert_to_tensor(array)
