"""TensorFlow's datasets, by names that may change; see ``tf_functions``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from tfcluster.runtime import tf_internals
from tfcluster.runtime.contract import PrivateName, names

if TYPE_CHECKING:
    import tensorflow as tf

    from tfcluster.runtime.tensor_types import ConcreteFunction, Dataset, Nest, Tensor

_PIPELINES = "dividing pipelines of tf.data among the ranks"
_BATCH = ("_batch_size", "_drop_remainder")
_MAP = ("_map_func", "_preserve_cardinality")
_PARALLEL = ("_num_parallel_calls", "_deterministic")
_IN_PARALLEL = "Parallel"
"""The beginning of kinds of datasets that call functions in parallel."""

NAMES = (
    *(
        PrivateName(f"tensorflow.python.data.ops.{where}.__init__", name, _PIPELINES)
        for where, own in (
            ("batch_op._BatchDataset", _BATCH),
            ("batch_op._ParallelBatchDataset", (*_BATCH, *_PARALLEL)),
            ("map_op._MapDataset", _MAP),
            ("map_op._ParallelMapDataset", (*_MAP, *_PARALLEL)),
            ("prefetch_op._PrefetchDataset", ("_buffer_size",)),
            ("repeat_op._RepeatDataset", ("_count",)),
            ("shuffle_op._ShuffleDataset", ("_reshuffle_each_iteration",)),
            ("skip_op._SkipDataset", ("_count",)),
            ("take_op._TakeDataset", ("_count",)),
        )
        for name in own
    ),
    *names(
        "tensorflow.python.data.ops.structured_function.StructuredFunctionWrapper",
        _PIPELINES,
        "function",
    ),
    *names(
        "tensorflow.python.data.ops.iterator_ops.OwnedIterator._create_iterator",
        _PIPELINES,
        "_iterator_resource",
    ),
    *names(
        "tensorflow.python.data.ops.iterator_ops.OwnedIterator",
        _PIPELINES,
        "_next_internal",
    ),
)


class OwnedIterator(Protocol):
    """An iterator over a dataset."""

    _iterator_resource: Tensor

    def __iter__(self) -> OwnedIterator: ...

    def __next__(self) -> Any: ...

    def get_next(self) -> Any: ...


def count_of(dataset: Dataset) -> int:
    """The argument of the ``repeat``, ``take`` or ``skip`` that made a dataset."""
    return int(dataset._count)


def reshuffles(dataset: Dataset) -> bool:
    """Whether what ``shuffle`` made has another order in each pass."""
    return bool(dataset._reshuffle_each_iteration)


def buffer_size_of(dataset: Dataset) -> int:
    """The argument of the ``prefetch`` that made a dataset."""
    return int(dataset._buffer_size)


def batch_size_of(dataset: Dataset) -> tuple[int, bool]:
    """The size, and whether a smaller last batch is dropped, of what ``batch`` made."""
    return int(dataset._batch_size), bool(dataset._drop_remainder)


def parallel_calls_of(dataset: Dataset) -> int | None:
    """``num_parallel_calls`` of the ``map`` or ``batch`` that made a dataset."""
    if not tf_internals.kind_of(dataset).startswith(_IN_PARALLEL):
        return None
    return int(dataset._num_parallel_calls)


def keeps_order(dataset: Dataset) -> bool:
    """Whether the ``map`` or ``batch`` that made a dataset must keep the order."""
    is_parallel = tf_internals.kind_of(dataset).startswith(_IN_PARALLEL)
    return not is_parallel or dataset._deterministic != "false"


def map_function_of(dataset: Dataset) -> ConcreteFunction | None:
    """The function of the ``map`` that made a dataset, whose arguments are flat.

    None for a function of TensorFlow 1, and one that may end the data.
    """
    function = dataset._map_func.function
    is_concrete = hasattr(function, "captured_inputs")
    return function if is_concrete and dataset._preserve_cardinality else None


def iterator_over(dataset: Dataset) -> OwnedIterator:
    """A new iterator over a dataset, outside of functions."""
    iterator: Any = iter(dataset)
    owned: OwnedIterator = iterator
    return owned


def late_iterator(spec: Nest, begin: Callable[[Tensor], None]) -> OwnedIterator:
    """An iterator with an empty resource, for which Python calls ``begin`` to read.

    Who passes it to a function that reads from it must call ``begin``, too.
    """
    import tensorflow as tf

    tensors: list[tf.TensorSpec] = tf.nest.flatten(spec)
    resource = tf.raw_ops.AnonymousIteratorV3(
        output_types=[tensor.dtype for tensor in tensors],
        output_shapes=[tensor.shape for tensor in tensors],
    )
    owned: OwnedIterator = _late_iterator_type()(resource, spec, begin)
    return owned


@functools.cache
def _late_iterator_type() -> Any:
    import tensorflow as tf
    from tensorflow.python.data.ops import iterator_ops

    class LateIterator(iterator_ops.OwnedIterator):  # type: ignore[misc]  # untyped
        def __init__(
            self, resource: Tensor, spec: Nest, begin: Callable[[Tensor], None]
        ) -> None:
            super().__init__(components=[resource], element_spec=spec)
            self._begin = begin

        def _next_internal(self) -> Nest:
            self._begin_in_python()
            return super()._next_internal()

        def get_next_as_optional(self) -> Any:
            self._begin_in_python()
            return super().get_next_as_optional()

        def _begin_in_python(self) -> None:
            if tf.executing_eagerly():
                self._begin(self._iterator_resource)

    return LateIterator


def resource_of(iterator: Any) -> Tensor:
    """The resource of an iterator over a dataset: what a function gets of it."""
    owned: OwnedIterator = iterator
    return owned._iterator_resource
