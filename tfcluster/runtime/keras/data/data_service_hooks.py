"""Lets the run's data tasks compute the program's datasets.

This applies to the datasets of ``fit`` and ``evaluate`` and to the datasets over which
custom loops iterate. It does not change which rows of a batch belong to which rank.

Ranks that train synchronously all get the same sequence of elements, and each element
is computed once. This uses the coordinated reads of tf.data service (Audibert et al.,
"tf.data service", 2023): it works in rounds, and each round is N copies of one element.
Coordinated reads require an infinite stream of rounds, so elements mark where the pass
ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from tfcluster.runtime import contract, tf_internals, tf_patches
from tfcluster.runtime.context import Context
from tfcluster.runtime.contract import HandlerPlace
from tfcluster.runtime.exchange.graph_ops import unconverted
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.data.dataset_graph import Pipeline
from tfcluster.runtime.keras.data.round_robin_sharding import (
    IS_SHARDED,
    YIELDS_BATCHES,
    serves_a_loop,
)
from tfcluster.runtime.keras.training_session import TrainingSession
from tfcluster.runtime.keras.types import EpochIterator
from tfcluster.runtime.tensor_types import Dataset, Nest, Tensor


@dataclass
class _Served:
    """A dataset that the data tasks compute, and the number of passes begun so far."""

    number: int
    pipeline: Pipeline | None
    passes: int = 0


def data_service_client(context: Context) -> DataServiceClient | None:
    """The client of the run's tf.data service.

    None if the run has no data service, or if this task can no longer join it.
    """
    if context.data_service is None:
        return None
    options = context.options
    client = DataServiceClient(
        service=context.data_service,
        tasks=context.data_tasks,
        run=f"{context.run or 'run'}/{context.attempt}",
        rank=context.rank,
        size=context.size,
        in_step=not context.is_independent,
    )
    if not options.divides:
        # Each rank has its own pipeline.
        run = f"{client.run}/{context.rank}"
        return replace(client, run=run, rank=0, size=1, in_step=True)
    # A task that restarts while others run does not know how far they are.
    return None if context.attempt and context.is_independent else client


class DataServiceHooks:
    """The hooks on everything that iterates over datasets."""

    def __init__(self, session: TrainingSession, client: DataServiceClient) -> None:
        self._session = session
        self._client = client
        self._datasets: weakref.WeakKeyDictionary[Dataset, _Served] = (
            weakref.WeakKeyDictionary()
        )
        self._count = 0

    def install(self) -> None:
        """Install the hooks in Keras and TensorFlow, once per process."""
        epochs = {patches.EPOCH_ITERATOR: self._epochs}
        patches.TABLE.install(epochs, HandlerPlace.SERVICE)
        tf_patches.TABLE.install(
            {tf_patches.DATASET_ITER: self._iter}, HandlerPlace.SERVICE
        )

    def _epochs(
        self,
        original: Callable[..., None],
        iterator: EpochIterator,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        original(iterator, *args, **kwargs)
        if not internals.reads_dataset(iterator):
            return
        if self._session.within("predicting"):
            # One rank may predict without the others.
            return
        # The program's dataset; Keras derives others from it (class weights).
        dataset = internals.dataset_of(iterator)
        served = self._served(dataset)
        if served.pipeline is None:
            return
        passes = Passes(dataset, lambda: iter(self._pass(served)))
        internals.set_dataset(iterator, passes)
        contract.mark(iterator, IS_SHARDED, not self._client.in_step)
        if self._client.tasks > 1 or not self._client.in_step:
            _leave_uncounted(iterator)

    def _iter(
        self, original: Callable[[Dataset], Iterator[Nest]], dataset: Dataset
    ) -> Iterator[Nest]:
        if not self._client.in_step or not serves_a_loop(self._session, dataset):
            return original(dataset)
        served = self._served(dataset)
        return original(dataset if served.pipeline is None else self._pass(served))

    def _served(self, dataset: Dataset) -> _Served:
        served = self._datasets.get(dataset)
        if served is None:
            self._count += 1
            served = _Served(self._count, self._pipeline(dataset))
            self._datasets[dataset] = served
        return served

    def _pipeline(self, dataset: Dataset) -> Pipeline | None:
        try:
            pipeline = Pipeline(dataset)
            reason = pipeline.why_local(self._client.tasks)
        except (tf.errors.OpError, ValueError) as error:
            reason = str(error).splitlines()[0]
        if reason is None:
            return pipeline
        self._session.warn(
            f"a tf.data pipeline is computed by every rank, not by the data tasks: "
            f"{reason}"
        )
        return None

    def _pass(self, served: _Served) -> Dataset:
        """The dataset of the next pass."""
        assert served.pipeline is not None
        job = f"{self._client.run}/{served.number}/{served.passes}"
        source = served.pipeline.for_pass(served.passes, job)
        served.passes += 1
        dataset = self._client.distributed(source, job, served.pipeline.cardinality)
        contract.mark(dataset, YIELDS_BATCHES, True)
        return dataset


class Passes(tf.data.Dataset):  # type: ignore[misc]  # untyped
    """A dataset like another one, whose iterators ``begin`` creates."""

    def __init__(self, dataset: Dataset, begin: Callable[[], Iterator[Nest]]) -> None:
        self._dataset = dataset
        self._begin = begin
        super().__init__(tf_internals.variant_of(dataset))

    def __iter__(self) -> Iterator[Nest]:
        return self._begin()

    def _inputs(self) -> Sequence[Dataset]:
        return [self._dataset]

    @property
    def element_spec(self) -> Nest:
        return self._dataset.element_spec


def _leave_uncounted(iterator: EpochIterator) -> None:
    """Let each epoch end where its data ends, however many batches the last one had."""
    # Without a number of steps, every pass ends because the data runs out, which is no
    # reason to warn.
    warns = internals.steps_of(iterator) is not None
    uncounted = internals.counted(type(iterator), None, warns=warns)
    patches.TABLE.replace(patches.ONE_EPOCH_ITERATOR_CLASS, iterator, uncounted)


# --- the client -----------------------------------------------------------------------


_Transformation = Callable[[Dataset], Dataset]
"""The type of the argument of ``Dataset.apply``."""


@dataclass(frozen=True, slots=True)
class DataServiceClient:
    """A consumer of tf.data service; knows the dispatcher and this rank's number."""

    service: str
    """``grpc://host:port`` of the dispatcher."""
    tasks: int
    """The number of data tasks."""
    run: str
    """The prefix of the names of jobs."""
    rank: int
    size: int
    in_step: bool
    """True if all ranks get every element; False if each element goes to the rank that
    first asks for one."""

    def distributed(self, source: Dataset, job: str, cardinality: int) -> Dataset:
        """The same dataset as ``source``, but computed by the data tasks.

        ``job`` must be the same on all ranks that take part in one pass.
        ``cardinality`` is ``source``'s, or ``tf.data.UNKNOWN_CARDINALITY``.
        """
        spec = source.element_spec
        packed = source.map(_packed)
        if not self.in_step:
            return packed.apply(self._transformation(job)).map(_unpacking(spec))
        end = tf.data.Dataset.from_tensors(0).map(_end).repeat()
        rounds = packed.concatenate(end).flat_map(self._round)
        stream = rounds.apply(
            self._transformation(job, consumer_index=self.rank, num_consumers=self.size)
        )
        whole = _until_the_end(stream, self.tasks).map(_unpacking(spec))
        # With several tasks, each has its own last, smaller batch.
        if self.tasks == 1 and cardinality != tf.data.UNKNOWN_CARDINALITY:
            whole = whole.apply(tf.data.experimental.assert_cardinality(cardinality))
        return whole.prefetch(1)

    def _transformation(self, job: str, **consumer: int) -> _Transformation:
        service = tf.data.experimental.service
        # A single task computes everything in order. Several tasks divide the source.
        alone, shared = service.ShardingPolicy.OFF, service.ShardingPolicy.DYNAMIC
        return service.distribute(
            processing_mode=alone if self.tasks == 1 else shared,
            service=self.service,
            job_name=job,
            compression=None,  # _packed compresses the elements.
            **consumer,
        )

    @unconverted
    def _round(self, *element: Tensor) -> Dataset:
        return tf.data.Dataset.from_tensors(element).repeat(self.size)


def _until_the_end(stream: Dataset, tasks: int) -> Dataset:
    """Cut off the stream after the end of the data.

    Rounds come from the tasks in turn, in the same order on all ranks, and the tasks
    reach their ends one by one. The stream does not wait for a lost task.
    """
    if tasks == 1:
        return stream.take_while(_is_real).map(_element)
    counted = stream.scan(0, _counted)
    # Each cycle over the tasks reads from every one of them.
    return counted.take_while(_before(2 * tasks)).filter(_is_real).map(_element)


@unconverted
def _counted(
    ends: Tensor, marked: tuple[Tensor, Tensor]
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Pair each element with the number of consecutive end marks up to it."""
    real, element = marked
    ends = tf.where(real, 0, ends + 1)
    return ends, (ends, real, element)


def _before(ends: int) -> Callable[..., Tensor]:
    @unconverted
    def before(*counted: Tensor) -> Tensor:
        return counted[0] < ends

    return before


@unconverted
def _is_real(*marked: Tensor) -> Tensor:
    return marked[-2]


@unconverted
def _element(*marked: Tensor) -> Tensor:
    return marked[-1]


@unconverted
def _packed(*element: Nest) -> tuple[bool, Tensor]:
    """Compress an element of any structure to one tensor, and mark it as data.

    The tensor is a scalar of dtype ``tf.variant``.
    """
    leaves = tf.nest.flatten(element, expand_composites=True)
    return True, tf.raw_ops.CompressElement(components=leaves)


@unconverted
def _end(nothing: Tensor) -> tuple[bool, Tensor]:
    return False, tf.raw_ops.CompressElement(components=[nothing])


def _unpacking(spec: Nest) -> Callable[..., Nest]:
    flat = tf.nest.flatten(spec, expand_composites=True)

    @unconverted
    def unpacked(*marked: Tensor) -> Nest:
        leaves = tf.raw_ops.UncompressElement(
            compressed=marked[-1],
            output_types=[spec_of_leaf.dtype for spec_of_leaf in flat],
            output_shapes=[spec_of_leaf.shape for spec_of_leaf in flat],
        )
        return tf.nest.pack_sequence_as(spec, leaves, expand_composites=True)

    return unpacked
