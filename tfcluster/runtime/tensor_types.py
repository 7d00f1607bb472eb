"""The types of TensorFlow's objects, as far as the runtime uses them.

TensorFlow has no type information, so mypy gives the results of its functions the type
``Any``. These protocols list the attributes and methods on which the runtime relies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

Nest: TypeAlias = object
"""Anything that ``tf.nest`` accepts: tensors, arrays or other values in nested tuples,
lists and dictionaries. Only functions for nested structures can use it."""


class DType(Protocol):
    """A ``tf.DType``."""

    name: str
    size: int
    as_datatype_enum: int
    is_floating: bool
    is_complex: bool
    is_integer: bool
    is_bool: bool
    base_dtype: DType
    as_numpy_dtype: Any
    """The type of numpy scalars with this dtype; not always a type of numpy."""


class Shape(Protocol):
    """A ``tf.TensorShape``."""

    rank: int | None

    def as_list(self) -> list[int | None]:
        """Raises ValueError if the rank is unknown."""

    def num_elements(self) -> int | None: ...

    def __iter__(self) -> Iterator[int | None]: ...

    def __getitem__(self, key: Any) -> Any: ...


class Tensor(Protocol):
    """A ``tf.Tensor``, eager or of a graph."""

    dtype: DType
    shape: Shape
    ndim: int
    name: str
    """Only tensors of a graph have it."""

    op: Operation
    """Only tensors of a graph have it."""

    graph: Graph
    """Only tensors of a graph have it."""

    device: str

    def numpy(self) -> Any:
        """An array, or a numpy number for a scalar. Only eager tensors have it."""

    def set_shape(self, shape: Shape | Sequence[int | None]) -> None: ...

    def __getitem__(self, key: Any) -> Tensor: ...

    def __int__(self) -> int: ...

    def __float__(self) -> float: ...

    def __neg__(self) -> Tensor: ...

    def __add__(self, other: TensorLike) -> Tensor: ...

    def __sub__(self, other: TensorLike) -> Tensor: ...

    def __mul__(self, other: TensorLike) -> Tensor: ...

    def __rmul__(self, other: TensorLike) -> Tensor: ...

    def __truediv__(self, other: TensorLike) -> Tensor: ...

    def __lt__(self, other: TensorLike) -> Tensor: ...

    def __gt__(self, other: TensorLike) -> Tensor: ...


TensorLike: TypeAlias = Tensor | Array | np.generic | complex
"""Anything except lists that ``tf.convert_to_tensor`` accepts; includes int, float and
bool."""

Number: TypeAlias = int | Tensor
"""A count or an index: a Python number if it is known, else a scalar tensor."""


class IndexedSlices(Protocol):
    """A ``tf.IndexedSlices``: a sparse gradient."""

    values: Tensor
    """Shape ``(n, ...)``: the rows."""

    indices: Tensor
    """Shape ``(n,)``: the numbers of the rows; a number may occur repeatedly."""

    dense_shape: Tensor | None
    dtype: DType
    shape: Shape


Gradient: TypeAlias = Tensor | IndexedSlices | None
"""None if the loss does not depend on the variable. ``tensors.is_sparse`` narrows it;
mypy cannot do so by ``isinstance`` of an untyped class."""

AGradient = TypeVar("AGradient", bound=Gradient)


class Operation(Protocol):
    """A ``tf.Operation``."""

    name: str
    type: str
    device: str
    graph: Graph
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    control_inputs: Sequence[Operation]
    node_def: ProtocolBuffer


class Graph(Protocol):
    """A ``tf.Graph``; only graphs of a ``tf.function`` have ``captures``."""

    seed: int | None

    def as_graph_def(self) -> ProtocolBuffer: ...

    def get_operation_by_name(self, name: str) -> Operation: ...

    def get_operations(self) -> Sequence[Operation]: ...

    name: str
    """Only graphs of a ``tf.function`` have it."""

    def as_default(self) -> AbstractContextManager[Graph]: ...

    def get_collection(self, name: str) -> list[Any]: ...


class ProtocolBuffer(Protocol):
    """A protocol buffer, such as a GraphDef or a NodeDef."""

    def CopyFrom(self, other: ProtocolBuffer) -> None: ...

    def SerializeToString(self, *, deterministic: bool = False) -> bytes: ...

    def __getattr__(self, field: str) -> Any: ...

    def __setattr__(self, field: str, value: Any) -> None: ...


class Variable(Protocol):
    """A ``tf.Variable``."""

    name: str
    dtype: DType
    shape: Shape
    device: str
    op: Operation
    """Only variables of a graph have it."""

    handle: Tensor
    """The resource: a scalar of dtype ``tf.resource``."""

    initial_value: Tensor

    def assign(self, value: TensorLike, *, read_value: bool = True) -> Any: ...

    def assign_add(self, delta: TensorLike, *, read_value: bool = True) -> Any: ...

    def __int__(self) -> int: ...

    def is_initialized(self) -> Tensor: ...

    def read_value(self) -> Tensor: ...

    def scatter_update(self, sparse_delta: IndexedSlices) -> Any: ...

    def numpy(self) -> Any: ...


class ConcreteFunction(Protocol):
    """A function that was traced for arguments of certain types."""

    name: bytes
    captured_inputs: Sequence[Tensor]
    graph: Graph
    inputs: Sequence[Tensor]
    """Placeholders of the graph; last come those of ``captured_inputs``."""
    outputs: Sequence[Tensor]

    def __call__(self, *args: Tensor) -> Sequence[Tensor]: ...


class Dataset(Protocol):
    """A ``tf.data.Dataset``. Its elements are nested structures of tensors."""

    _variant_tensor: Tensor
    element_spec: Nest

    # Only some kinds have these.
    _batch_size: Tensor
    _buffer_size: Tensor
    _count: Tensor
    _deterministic: str
    _drop_remainder: Tensor
    _map_func: Any
    _num_parallel_calls: Tensor
    _preserve_cardinality: bool
    _reshuffle_each_iteration: bool

    def _inputs(self) -> Sequence[Dataset]: ...

    def __iter__(self) -> Iterator[Any]: ...

    def as_numpy_iterator(self) -> Iterator[Any]: ...

    def cardinality(self) -> Tensor: ...

    def options(self) -> Any: ...

    def with_options(self, options: Any) -> Dataset: ...

    def apply(self, transformation: Callable[[Dataset], Dataset]) -> Dataset: ...

    def concatenate(self, dataset: Dataset) -> Dataset: ...

    def enumerate(self) -> Dataset: ...

    def filter(self, predicate: Callable[..., Tensor]) -> Dataset: ...

    def flat_map(self, map_func: Callable[..., Dataset]) -> Dataset: ...

    def batch(
        self,
        batch_size: int | Tensor,
        *,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
    ) -> Dataset: ...

    def get_single_element(self) -> Any: ...

    def map(
        self, map_func: Callable[..., Nest], num_parallel_calls: int | None = None
    ) -> Dataset: ...

    def prefetch(self, buffer_size: int) -> Dataset: ...

    def repeat(self, count: int) -> Dataset: ...

    def scan(self, initial_state: Nest, scan_func: Callable[..., Nest]) -> Dataset: ...

    def shard(self, num_shards: int, index: int) -> Dataset: ...

    def skip(self, count: int) -> Dataset: ...

    def take(self, count: int) -> Dataset: ...

    def take_while(self, predicate: Callable[..., Tensor]) -> Dataset: ...

    def unbatch(self) -> Dataset: ...
