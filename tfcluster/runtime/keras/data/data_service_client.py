"""Compute a dataset on the data tasks, and receive this rank's elements.

Ranks that train synchronously all get the same sequence of elements, and each element
is computed once: tf.data service works in rounds (coordinated reads), and each round is
N copies of one element. Coordinated reads require an infinite stream of rounds, so
elements mark where the pass ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf


@dataclass(frozen=True, slots=True)
class DataServiceClient:
    """A consumer of tf.data service; knows the dispatcher and this rank's number."""

    service: str
    """``grpc://host:port`` of the dispatcher."""
    tasks: int
    """The number of data tasks."""
    rank: int
    size: int
    in_step: bool
    """True: all ranks get every element. False: each goes to the first that asks."""

    def handed_out(self, source: Any, job: str, cardinality: int) -> Any:
        """``source``, but computed by the data tasks.

        ``job`` must be the same on all ranks that take part in one pass.
        """
        spec = source.element_spec
        packed = source.map(_packed)
        if not self.in_step:
            return packed.apply(self._distributed(job)).map(_unpacking(spec))
        end = tf.data.Dataset.from_tensors(0).map(_end).repeat()
        rounds = packed.concatenate(end).flat_map(self._round)
        stream = rounds.apply(
            self._distributed(job, consumer_index=self.rank, num_consumers=self.size)
        )
        whole = _until_the_end(stream, self.tasks).map(_unpacking(spec))
        # With several tasks, each has its own last, smaller batch.
        if self.tasks == 1 and cardinality != tf.data.UNKNOWN_CARDINALITY:
            whole = whole.apply(tf.data.experimental.assert_cardinality(cardinality))
        return whole.prefetch(1)

    def _distributed(self, job: str, **consumer: int) -> Any:
        service = tf.data.experimental.service
        # A single task computes everything in order. Several divide the source among
        # them.
        alone, shared = service.ShardingPolicy.OFF, service.ShardingPolicy.DYNAMIC
        return service.distribute(
            processing_mode=alone if self.tasks == 1 else shared,
            service=self.service,
            job_name=job,
            compression=None,  # elements are compressed by us
            **consumer,
        )

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _round(self, *element: Any) -> Any:
        return tf.data.Dataset.from_tensors(element).repeat(self.size)


def _until_the_end(stream: Any, tasks: int) -> Any:
    """Cut off the stream after the end of the data.

    Rounds come from the tasks in turn, in the same order on all ranks, and the tasks
    reach their ends one by one. A lost task is not waited for.
    """
    if tasks == 1:
        return stream.take_while(_is_real).map(_element)
    counted = stream.scan(0, _counted)
    # Each turn around the tasks asks every one of them.
    return counted.take_while(_before(2 * tasks)).filter(_is_real).map(_element)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _counted(ends: Any, found: tuple[Any, Any]) -> tuple[Any, Any]:
    """Pair each element with the number of consecutive end marks up to it."""
    real, element = found
    ends = tf.where(real, 0, ends + 1)
    return ends, (ends, real, element)


def _before(ends: int) -> Any:
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def before(*found: Any) -> Any:
        return found[0] < ends

    return before


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _is_real(*found: Any) -> Any:
    return found[-2]


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _element(*found: Any) -> Any:
    return found[-1]


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _packed(*element: Any) -> tuple[Any, Any]:
    """Compress an element of any structure to one tensor, and mark it as no end."""
    leaves = tf.nest.flatten(element, expand_composites=True)
    return True, tf.raw_ops.CompressElement(components=leaves)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _end(nothing: Any) -> tuple[Any, Any]:
    return False, tf.raw_ops.CompressElement(components=[nothing])


def _unpacking(spec: Any) -> Any:
    flat = tf.nest.flatten(spec, expand_composites=True)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def unpacked(*found: Any) -> Any:
        leaves = tf.raw_ops.UncompressElement(
            compressed=found[-1],
            output_types=[each.dtype for each in flat],
            output_shapes=[each.shape for each in flat],
        )
        return tf.nest.pack_sequence_as(spec, leaves, expand_composites=True)

    return unpacked
