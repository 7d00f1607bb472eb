"""Have the data tasks compute a pipeline, and take this rank's part of what they make.

Ranks in step all get the same sequence of elements, each of which is computed once:
the service deals in rounds, and every round is N copies of one element. A stream of
rounds has no end, as the service wants it, but its elements say where the pass is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf


@dataclass(frozen=True, slots=True)
class DataServiceClient:
    """Where elements are handed out, and who this rank is there."""

    service: str
    """``grpc://host:port`` of the dispatcher."""
    tasks: int
    """How many data tasks compute."""
    rank: int
    size: int
    in_step: bool
    """All ranks get every element; else each goes to the first that asks."""

    def handed_out(self, source: Any, job: str, cardinality: int) -> Any:
        """``source``, computed by the data tasks.

        Ranks that take part in one pass have the same name for it, ``job``.
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
        # Several tasks have a last, smaller batch each.
        if self.tasks == 1 and cardinality != tf.data.UNKNOWN_CARDINALITY:
            whole = whole.apply(tf.data.experimental.assert_cardinality(cardinality))
        return whole.prefetch(1)

    def _distributed(self, job: str, **consumer: int) -> Any:
        service = tf.data.experimental.service
        # One task computes all, in order. Several divide the source among them.
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
    """Without what comes after the end.

    Rounds are taken from the tasks in turn, the same for all ranks, and tasks come to
    their ends one by one; one that is lost is not waited for.
    """
    if tasks == 1:
        return stream.take_while(_is_real).map(_element)
    counted = stream.scan(0, _counted)
    # In each turn around the tasks every one of them is asked.
    return counted.take_while(_before(2 * tasks)).filter(_is_real).map(_element)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _counted(ends: Any, found: tuple[Any, Any]) -> tuple[Any, Any]:
    """The ends in a row, before each element of a stream."""
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
    """An element of whatever structure as one tensor, and that it is one."""
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
