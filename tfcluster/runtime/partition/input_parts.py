"""Batches of which a rank computes its own rows only; see ``input_pipelines``.

The elements before the functions are batched, so the size of a batch is known, and a
rank can go on with its own rows::

    source -> batch -> own rows -> unbatch -> map ... -> batch -> batch stages

The last stages yield a rank's rows of each batch, and a record of the batch: all of its
elements before the functions, and a checksum of them. So the whole batch can be
computed at any time, and ranks can compare what they have read. Elements whose shapes
are not known are batched as variants, which costs more. Functions of batches among the
last stages are those for a rank's rows of a full batch; a smaller batch is computed
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime.partition import tf_datasets
from tfcluster.runtime.partition.graph import elements_of
from tfcluster.runtime.partition.input_pipelines import (
    BatchMap,
    BatchPipeline,
    ElementMap,
    with_stage,
)
from tfcluster.runtime.partition.placement import Split
from tfcluster.runtime.partition.shape_graph import shape_of
from tfcluster.runtime.partition.tf_datasets import OwnedIterator
from tfcluster.runtime.tensor_types import (
    ConcreteFunction,
    Dataset,
    Nest,
    Tensor,
)

_CHECKSUM_BYTES = 8
_ENDLESS = 1 << 62
"""More batches than there are."""


class DividedPipeline:
    """A pipeline of which this rank computes the rows of ``split``."""

    def __init__(self, pipeline: BatchPipeline, split: Split) -> None:
        self._pipeline = pipeline
        self.split = split
        self.is_divided = True
        self._is_checked = not pipeline.reads_files
        """Whether ranks have compared results of the functions."""
        self._digest = np.frombuffer(pipeline.digest.to_bytes(4, "little"), np.uint8)
        size = pipeline.batch_size
        splits = [Split(rank, split.size) for rank in range(split.size)]
        self.can_divide = np.array(
            [
                rows >= split.size
                and all(own.count(rows) <= own.count(size) for own in splits)
                for rows in range(size + 1)
            ]
        )
        """Whether a batch of so many rows is divided: no rank may have more rows of a
        smaller last batch than of the others, since these are batched alike."""
        if any(isinstance(stage, BatchMap) for stage in pipeline.batch_stages):
            self.can_divide[:size] = False
        specs = tf.nest.flatten(pipeline.source.element_spec)
        self._source = pipeline.source
        self._wrapped: Sequence[tf.TensorSpec] | None = None
        # TensorFlow's unbatch() crashes with tensors that hold nothing.
        is_known = all(elements_of(shape_of(spec)) for spec in specs)
        if pipeline.maps and not is_known:
            self._source, self._wrapped = pipeline.source.map(_wrapped), specs
        self._specs = [
            tf.TensorSpec([None, *spec.shape], spec.dtype)
            for spec in tf.nest.flatten(self._source.element_spec)
        ]
        """Those of a batch of the source."""
        self._dataset: Dataset | None = None
        self._readers: tuple[ConcreteFunction, ...] | None = None
        self._compute: ConcreteFunction | None = None

    @property
    def whole(self) -> Dataset:
        """The dataset itself."""
        return self._pipeline.whole

    @property
    def parts(self) -> Dataset:
        """The dataset of this rank's parts and of records."""
        if self._dataset is None:
            self._dataset = self._parts()
        return self._dataset

    def compared(
        self, checksum: Tensor, compute_whole: Callable[[], list[Tensor]]
    ) -> Tensor:
        """What is equal on all ranks if a batch is equal.

        ``checksum`` is that of its elements before the functions.
        """
        results = np.zeros(_CHECKSUM_BYTES, np.uint8)
        if not self._is_checked:
            self._is_checked = True
            results = np.asarray(_checksum(*compute_whole()))
        numbers = [np.asarray(checksum), self._digest, results]
        return tf.constant(np.concatenate(numbers))

    def compute_whole(self, elements: Sequence[Tensor]) -> list[Tensor]:
        """A batch, from its elements before the functions."""
        if self._compute is None:
            function = tf.function(self._whole_batch, autograph=False)
            self._compute = function.get_concrete_function(*self._specs)
        return list(self._compute(*elements))

    def read(self, records: Tensor) -> tuple[list[Tensor], Tensor]:
        """The elements of a batch before the functions, and their checksum.

        ``records`` has the batch's record once for each row of the part.
        """
        kinds = _kinds([*self._specs, tf.TensorSpec([_CHECKSUM_BYTES], tf.uint8)])
        *elements, checksum = tf.raw_ops.OptionalGetValue(optional=records[0], **kinds)
        return elements, checksum

    # --- datasets ---------------------------------------------------------------------

    def _parts(self) -> Dataset:
        """The parts of the tensors of each batch, and its record for each row."""
        pipeline, split = self._pipeline, self.split
        size, drops = pipeline.batch_size, pipeline.drops_remainder
        can_divide = tf.constant(self.can_divide)

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def own_rows(*batch: Nest) -> Nest:
            elements = tf.nest.flatten(batch)
            rows = tf.shape(elements[0], tf.int64)[0]
            divides = tf.gather(can_divide, rows)
            first = tf.where(divides, split.rank * rows // split.size, 0)
            last = tf.where(divides, (split.rank + 1) * rows // split.size, 1)
            numbers = elements if self._wrapped is None else elements[1:]
            record = _optional([*elements, _checksum(*numbers)])
            records = tf.gather([record], tf.zeros([last - first], tf.int32))
            return (*(tensor[first:last] for tensor in elements), records)

        own_size = split.count(size)
        parts = self._source.batch(size, drop_remainder=drops).map(own_rows)
        if pipeline.maps:
            parts = self._mapped(parts.unbatch()).batch(
                own_size,
                drop_remainder=drops,
                num_parallel_calls=pipeline.parallel_batches,
            )
        for stage in pipeline.batch_stages:
            if isinstance(stage, BatchMap):
                function = _of_own_rows(stage, own_size)
                parts = parts.map(function, num_parallel_calls=stage.parallel_calls)
            else:
                parts = with_stage(stage, parts)
        return parts.with_options(pipeline.whole.options())

    def _mapped(self, dataset: Dataset) -> Dataset:
        """The functions applied to the source's elements; a record may follow."""
        wrapped, count = self._wrapped, len(self._specs)
        for stage in self._pipeline.maps:
            if isinstance(stage, ElementMap):
                function = _function_of(stage, count, wrapped)
                dataset = dataset.map(function, num_parallel_calls=stage.parallel_calls)
                if wrapped is not None:
                    count = len(wrapped)
                    wrapped = None
                count += stage.results - stage.arguments
            else:
                dataset = with_stage(stage, dataset)
        return dataset

    def _whole_of(self, elements: Sequence[Tensor]) -> Dataset:
        """A dataset of the batch of these elements."""
        dataset = self._mapped(tf.data.Dataset.from_tensor_slices(tuple(elements)))
        batch = dataset.batch(tf.shape(elements[0], tf.int64)[0])
        for stage in self._pipeline.batch_stages:
            if isinstance(stage, BatchMap):
                batch = batch.map(_of_batches(stage))
        return batch

    def _whole_batch(self, *elements: Tensor) -> Sequence[Tensor]:
        batch: Sequence[Tensor] = self._whole_of(elements).get_single_element()
        return batch

    def whole_batches(self, parts: OwnedIterator) -> Dataset:
        """The whole batches of which an iterator yields parts and records.

        Only ops, since the functions would be traced again in each pass.
        """
        if self._readers is None:
            self._readers = self._traced_readers()
        take, is_there, whole = self._readers
        resource = tf_datasets.resource_of(parts)
        optional: dict[str, Any] = {"output_types": [tf.variant], "output_shapes": [[]]}
        spec = self._pipeline.whole.element_spec
        optionals = tf.raw_ops.MapDataset(
            input_dataset=tf.data.experimental.to_variant(
                tf.data.Dataset.range(_ENDLESS)
            ),
            other_arguments=[resource],
            f=take,
            **optional,
        )
        there = tf.raw_ops.TakeWhileDataset(
            input_dataset=optionals, other_arguments=[], predicate=is_there, **optional
        )
        batches = tf.raw_ops.FlatMapDataset(
            input_dataset=there,
            other_arguments=whole.captured_inputs,
            f=whole,
            **_kinds(tf.nest.flatten(spec)),
        )
        options = tf.data.Options()
        # It must take no batch that nobody has asked for.
        options.autotune.enabled = False
        options.experimental_optimization.inject_prefetch = False
        # Each pass would cost that time, and few batches are taken so.
        options.experimental_optimization.apply_default_optimizations = False
        dataset: Dataset = tf.data.experimental.from_variant(batches, spec)
        return dataset.with_options(options)

    def _traced_readers(self) -> tuple[ConcreteFunction, ...]:
        """Functions of the next optional, whether it has a value, and its batch."""
        assert self._dataset is not None
        kinds = _kinds(tf.nest.flatten(self._dataset.element_spec))
        optional = tf.TensorSpec([], tf.variant)

        def take(number: Tensor, iterator: Tensor) -> Tensor:
            return tf.raw_ops.IteratorGetNextAsOptional(iterator=iterator, **kinds)

        def is_there(optional: Tensor) -> Tensor:
            return tf.raw_ops.OptionalHasValue(optional=optional)

        def whole(optional: Tensor) -> Tensor:
            *_, records = tf.raw_ops.OptionalGetValue(optional=optional, **kinds)
            return tf.data.experimental.to_variant(
                self._whole_of(self.read(records)[0])
            )

        scalars = [tf.TensorSpec([], dtype) for dtype in (tf.int64, tf.resource)]
        return tuple(
            tf.function(function, autograph=False).get_concrete_function(*specs)
            for function, specs in (
                (take, scalars),
                (is_there, [optional]),
                (whole, [optional]),
            )
        )


# --- functions of the datasets --------------------------------------------------------


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _wrapped(*element: Nest) -> tuple[Tensor, Tensor]:
    """An element of any shapes as a variant, and its checksum."""
    tensors = tf.nest.flatten(element)
    return _optional(tensors), _checksum(*tensors)


def _function_of(
    stage: ElementMap, count: int, wrapped: Sequence[tf.TensorSpec] | None
) -> Callable[..., Nest]:
    """The function for elements of ``count`` tensors that a record may follow.

    Among them are tensors that later functions draw. Those that are ``wrapped`` are
    variants that hold tensors like these.
    """

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def function(*element: Tensor) -> Nest:
        tensors, others = element[:count], element[count:]
        if wrapped is not None:
            tensors = tf.raw_ops.OptionalGetValue(
                optional=tensors[0], **_kinds(wrapped)
            )
        before, rest = tensors[: stage.first], tensors[stage.first :]
        own, later = rest[: stage.arguments], rest[stage.arguments :]
        return (*before, *stage.function(*own), *later, *others)

    mapped: Callable[..., Nest] = function
    return mapped


def _of_own_rows(stage: BatchMap, own_size: int) -> Callable[..., Nest]:
    """The function for the rank's rows of a batch, which a record of it follows.

    It returns nothing for batches of another size. A rank may have as many rows of a
    smaller batch as of others; nobody reads what it then computes.
    """

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def function(*part: Tensor) -> Nest:
        *own, record = part
        is_full = tf.equal(tf.shape(own[0])[0], own_size)
        results = tf.cond(is_full, lambda: stage.own(*own), stage.own.nothing)
        return (*results, record)

    mapped: Callable[..., Nest] = function
    return mapped


def _of_batches(stage: BatchMap) -> Callable[..., Nest]:
    """The function for whole batches of flat tensors."""

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def function(*batch: Tensor) -> Nest:
        return tuple(stage.whole(*batch))

    mapped: Callable[..., Nest] = function
    return mapped


def _kinds(specs: Sequence[tf.TensorSpec]) -> dict[str, Any]:
    return {
        "output_types": [spec.dtype for spec in specs],
        "output_shapes": [spec.shape for spec in specs],
    }


def _optional(tensors: Sequence[Tensor]) -> Tensor:
    optional: Tensor = tf.raw_ops.OptionalFromValue(components=tensors)
    return optional


def _checksum(*tensors: Tensor) -> Tensor:
    """A checksum of tensors of numbers or strings: uint8 of shape (8,)."""
    checksums = [
        tf.raw_ops.Fingerprint(data=tf.reshape(tensor, [1, -1]), method="farmhash64")
        for tensor in tensors
    ]
    if len(checksums) > 1:
        return _checksum(tf.concat(checksums, 1))
    checksum: Tensor = checksums[0][0]
    return checksum
