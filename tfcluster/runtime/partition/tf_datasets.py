"""TensorFlow's datasets, by names that may change; see ``tf_functions``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tfcluster.runtime import tf_internals
from tfcluster.runtime.contract import PrivateName, names

if TYPE_CHECKING:
    import tensorflow as tf

    from tfcluster.runtime.tensor_types import (
        ConcreteFunction,
        Dataset,
        Nest,
        ProtocolBuffer,
        Tensor,
    )

_PIPELINES = "dividing pipelines of tf.data among the ranks"
_BATCH = ("_batch_size", "_drop_remainder")
_MAP = ("_map_func", "_preserve_cardinality")
_SHUFFLE = ("_buffer_size", "_seed", "_seed2", "_reshuffle_each_iteration")
_RESHUFFLES = "_reshuffle_each_iteration"
_PARALLEL = ("_num_parallel_calls", "_deterministic")
_IN_MEMORY = ("Tensor", "TensorSlice")
_IN_PARALLEL = "Parallel"
"""The beginning of kinds of datasets that call functions in parallel."""

NAMES = (
    *(
        PrivateName(f"tensorflow.python.data.ops.{where}.__init__", name, _PIPELINES)
        for where, own in (
            ("batch_op._BatchDataset", _BATCH),
            ("batch_op._ParallelBatchDataset", (*_BATCH, *_PARALLEL)),
            ("from_tensor_slices_op._TensorSliceDataset", ("_tensors",)),
            ("from_tensors_op._TensorDataset", ("_tensors",)),
            ("map_op._MapDataset", _MAP),
            ("map_op._ParallelMapDataset", (*_MAP, *_PARALLEL)),
            ("prefetch_op._PrefetchDataset", ("_buffer_size",)),
            ("repeat_op._RepeatDataset", ("_count",)),
            ("shuffle_op._ShuffleDataset", _SHUFFLE),
            ("skip_op._SkipDataset", ("_count",)),
            ("take_op._TakeDataset", ("_count",)),
        )
        for name in own
    ),
    *names(
        "tensorflow.python.data.ops.dataset_ops",
        _PIPELINES,
        "UnaryUnchangedStructureDataset",
    ),
    *names("tensorflow.data.Dataset", _PIPELINES, "_flat_structure"),
    *names(
        "tensorflow.python.data.ops.structured_function.StructuredFunctionWrapper",
        _PIPELINES,
        "function",
    ),
    *names(
        "tensorflow.python.data.ops.iterator_ops.OwnedIterator._create_iterator",
        _PIPELINES,
        "_iterator_resource",
        "_dataset",
    ),
    *names(
        "tensorflow.python.data.ops.iterator_ops.OwnedIterator",
        _PIPELINES,
        "_next_internal",
        "_serialize_to_tensors",
        "_restore_from_tensors",
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


_MOST_BYTES = 1 << 28
"""Of the data of a pipeline that may be copied to read its graph."""


def seed_generator_of(shuffle: Dataset) -> Tensor:
    """The handle of the generator from which a ``shuffle`` draws seeds for each pass.

    Raises ValueError if it cannot be found.
    """
    import tensorflow as tf

    found = _generators.get(shuffle)
    if found is None:
        if _bytes_of(shuffle) > _MOST_BYTES:
            raise ValueError(f"its data have more than {_MOST_BYTES >> 20} MiB")
        try:
            graph = tf.compat.v1.GraphDef.FromString(
                tf.raw_ops.DatasetToGraphV2(
                    input_dataset=tf_internals.variant_of(shuffle),
                    external_state_policy=1,  # Nothing runs this graph.
                ).numpy()
            )
        except (tf.errors.OpError, ValueError) as error:
            raise ValueError(f"its pipeline cannot be read: {error}") from error
        nodes = {node.name: node for node in graph.node}
        results = [node.input[0] for node in graph.node if node.op == "_Retval"]
        last = nodes[results[0].partition(":")[0]] if results else None
        if last is None or last.op != "ShuffleDatasetV3":
            raise ValueError("it is of another version of TensorFlow")
        handle = nodes[last.input[4].partition(":")[0]].attr["value"].tensor
        found = _generators[shuffle] = _resource(handle)
    return found


_generators: weakref.WeakKeyDictionary[Dataset, Tensor] = weakref.WeakKeyDictionary()
"""The handles that were found, by the datasets that own the generators."""


def _resource(handle: ProtocolBuffer) -> Tensor:
    """An eager tensor that holds this handle, a TensorProto."""
    import tensorflow as tf

    node = tf.compat.v1.NodeDef(name="handle", op="Const")
    node.attr["dtype"].type = tf.resource.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(handle)
    definition = tf.compat.v1.GraphDef(node=[node])

    def make() -> Tensor:
        (tensor,) = tf.graph_util.import_graph_def(definition, {}, ["handle:0"])
        return tensor

    tensor: Tensor = tf.function(make, autograph=False).get_concrete_function()()
    return tensor


def _bytes_of(dataset: Dataset) -> int:
    """How many bytes of data a pipeline holds itself, not in files."""
    source: Any = dataset
    own = source._tensors if tf_internals.kind_of(dataset) in _IN_MEMORY else ()
    inputs = tf_internals.inputs_of(dataset)
    return sum(map(_size_of, own)) + sum(map(_bytes_of, inputs))


def _size_of(tensor: Tensor) -> int:
    import tensorflow as tf

    if tensor.dtype == tf.string:
        return sum(map(len, tensor.numpy().reshape(-1).tolist()))
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size


def shuffled_like(shuffle: Dataset, dataset: Dataset) -> Dataset:
    """``dataset`` in the order in which ``shuffle`` shuffles.

    Passes over either of them draw their seeds from one generator. Raises ValueError if
    that is not possible.
    """
    shuffled: Dataset = _shuffle_type()(shuffle, dataset)
    return shuffled


@functools.cache
def _shuffle_type() -> Any:
    import tensorflow as tf
    from tensorflow.python.data.ops import dataset_ops

    base: Any = dataset_ops.UnaryUnchangedStructureDataset

    class ShuffleDataset(base):  # type: ignore[misc]  # untyped
        def __init__(self, like: Any, dataset: Dataset) -> None:
            self._reshuffle_each_iteration = like._reshuffle_each_iteration
            self._like = like
            variant = tf.raw_ops.ShuffleDatasetV3(
                input_dataset=tf_internals.variant_of(dataset),
                buffer_size=like._buffer_size,
                seed=like._seed,
                seed2=like._seed2,
                seed_generator=seed_generator_of(like),
                reshuffle_each_iteration=like._reshuffle_each_iteration,
                **like._flat_structure,
            )
            super().__init__(dataset, variant)

    return ShuffleDataset


def shuffles_of(dataset: Dataset) -> set[int]:
    """What passes over a dataset draw seeds for, as numbers.

    A shuffle that is ``shuffled_like`` another has its number.
    """
    found: set[int] = set()
    for source in tf_internals.inputs_of(dataset):
        found |= shuffles_of(source)
    like = getattr(dataset, "_like", dataset)
    kind = tf_internals.kind_of(dataset)
    if kind == "Random" or ("Shuffle" in kind and getattr(like, _RESHUFFLES, True)):
        found.add(id(like))
    return found


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


class BatchReader(Protocol):
    """What yields the batches of a late iterator."""

    def next_whole(self) -> Sequence[Tensor] | None:
        """The tensors of the next batch; None if Python reads it from the resource.

        Raises OutOfRangeError at the end of the data.
        """

    def begin_whole(self, resource: Tensor) -> None:
        """Let ops that read from this resource get whole batches."""

    def become_whole(self) -> None:
        """Let the iterator be an ordinary one, unless something was read."""

    def dataset(self) -> Dataset:
        """The dataset of an ordinary iterator; raises an error for another."""


def late_iterator(spec: Nest, reader: BatchReader) -> OwnedIterator:
    """An iterator whose resource is empty until ``reader`` begins to fill it.

    Who passes it to a function that reads from it must let the reader begin.
    """
    import tensorflow as tf

    tensors: list[tf.TensorSpec] = tf.nest.flatten(spec)
    resource = tf.raw_ops.AnonymousIteratorV3(
        output_types=[tensor.dtype for tensor in tensors],
        output_shapes=[tensor.shape for tensor in tensors],
    )
    owned: OwnedIterator = _late_iterator_type()(resource, spec, reader)
    return owned


def fill(resource: Tensor, dataset: Dataset) -> None:
    """Let the iterator with this resource begin a pass over a dataset."""
    import tensorflow as tf

    variant = tf.data.experimental.to_variant(dataset)
    tf.raw_ops.MakeIterator(dataset=variant, iterator=resource)


@functools.cache
def _late_iterator_type() -> Any:
    import tensorflow as tf
    from tensorflow.python.data.ops import iterator_ops

    class LateIterator(iterator_ops.OwnedIterator):  # type: ignore[misc]  # untyped
        def __init__(self, resource: Tensor, spec: Nest, reader: BatchReader) -> None:
            super().__init__(components=[resource], element_spec=spec)
            self._reader = reader

        def _next_internal(self) -> Nest:
            if tf.executing_eagerly():
                batch = self._reader.next_whole()
                if batch is not None:
                    return tf.nest.pack_sequence_as(self.element_spec, batch)
                self._reader.begin_whole(self._iterator_resource)
            return super()._next_internal()

        def get_next_as_optional(self) -> Any:
            if tf.executing_eagerly():
                self._reader.begin_whole(self._iterator_resource)
            return super().get_next_as_optional()

        def tfcluster_become_whole(self) -> None:
            self._reader.become_whole()

        def _serialize_to_tensors(self) -> Any:
            self._dataset = self._reader.dataset()
            return super()._serialize_to_tensors()

        def _restore_from_tensors(self, restored_tensors: Any) -> Any:
            self._dataset = self._reader.dataset()
            return super()._restore_from_tensors(restored_tensors)

    return LateIterator


def track(
    original: Callable[..., Any], owner: Any, one: Any, *args: Any, **keywords: Any
) -> Any:
    """Let an object track another one; an iterator that may be saved is ordinary."""
    if isinstance(one, _late_iterator_type()):
        one.tfcluster_become_whole()
    return original(owner, one, *args, **keywords)


def resource_of(iterator: Any) -> Tensor:
    """The resource of an iterator over a dataset: what a function gets of it."""
    owned: OwnedIterator = iterator
    return owned._iterator_resource
