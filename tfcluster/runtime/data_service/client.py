"""A rank as a client of tf.data service.

Ranks that train synchronously all get the same sequence of elements, and each element
is computed once. This uses the coordinated reads of tf.data service (Audibert et al.,
"tf.data service", 2023): it works in rounds, and each round is N copies of one element.
Coordinated reads require an infinite stream of rounds, so elements mark where the pass
ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import tensorflow as tf

from tfcluster.runtime.context import Context
from tfcluster.runtime.exchange.graph_ops import unconverted
from tfcluster.runtime.tensor_types import Dataset, Nest, Tensor

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
