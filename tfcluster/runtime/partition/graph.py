"""The graph of a specialised function, as rules and passes see it.

It holds the whole batch. Every value has a dtype and a shape, and a constant if it
depends on no input. TensorFlow has inferred both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfcluster.runtime.partition.placement import Shape
from tfcluster.runtime.tensor_types import Array, DType, ProtocolBuffer

_UNKNOWN: Any = object()


@dataclass(frozen=True, slots=True)
class ListType:
    """What is known of a TensorList: its elements' dtype and shape, and its length."""

    dtype: DType | None
    shape: Shape | None = None
    length: int | None = None
    begun: bool = False
    """Whether an element is known; if not, ``shape`` is None."""
    constant: Array | None = None
    """The value of all elements, if they are equal and known."""


@dataclass(eq=False, slots=True)
class Value:
    """An output of a node."""

    node: Node
    index: int
    dtype: DType
    shape: Shape | None = None
    list: ListType | None = None
    """For a TensorList."""
    _evaluate: Callable[[], Array | None] | None = None
    _constant: Array | None = _UNKNOWN

    @property
    def constant(self) -> Array | None:
        """The value, if it depends on no input; None if it is not known or large."""
        if self._constant is _UNKNOWN:
            self._constant = None if self._evaluate is None else self._evaluate()
        return self._constant

    @constant.setter
    def constant(self, value: Array | None) -> None:
        self._constant = value

    def evaluate_by(self, evaluate: Callable[[], Array | None]) -> None:
        """Let ``constant`` be what the function returns, if somebody asks."""
        self._evaluate = evaluate

    @property
    def elements(self) -> int | None:
        """The number of elements; None if the shape is not fully known."""
        return elements_of(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in bytes; 0 if the shape is not fully known."""
        return (self.elements or 0) * self.dtype.size

    @property
    def is_handle(self) -> bool:
        """Whether it is a resource or a variant, which has no rows."""
        return self.dtype in (tf.resource, tf.variant)


@dataclass(eq=False, slots=True)
class Node:
    """An op of the graph."""

    name: str
    type: str
    inputs: list[Value]
    controls: list[Node]
    attributes: Mapping[str, ProtocolBuffer]
    """``AttrValue`` messages."""
    device: str = ""
    stateful: bool = False
    """Whether TensorFlow's definition of the op says so."""
    origin: tuple[str, ...] = ()
    """The names of the calls around the node in the traced function, and its own."""
    outputs: list[Value] = field(default_factory=list)
    for_xla: bool = False
    """Whether the script wants XLA to compile the node."""
    bodies: tuple[OpGraph, ...] = ()
    """The condition and the body of a loop, or the branches (first "else")."""
    _folded: bool | None = None

    def attribute(self, name: str) -> Any:
        """An attribute as a Python value; None if the node does not have it."""
        message = self.attributes.get(name)
        return None if message is None else python_value(message)

    @property
    def is_folded(self) -> bool:
        """Whether all outputs are small known integers, such as shapes and axes.

        Then nothing has to be computed, and no input is needed.
        """
        if self._folded is None:
            self._folded = (
                not self.stateful
                and not self.bodies
                and bool(self.outputs)
                and self.type != "Placeholder"
                and all(map(_is_small_constant, self.outputs))
            )
        return self._folded

    def __repr__(self) -> str:
        return f"<{self.type} {self.name}>"


def _is_small_constant(value: Value) -> bool:
    dtype, shape = value.dtype, value.shape
    if not (dtype.is_integer or dtype.is_bool) or shape is None or len(shape) > 1:
        return False
    if (elements_of(shape) or 0) > _MOST_FOLDED:
        return False
    return value.constant is not None


_MOST_FOLDED = 8192


@dataclass(eq=False, slots=True)
class OpGraph:
    """A function's ops in an order in which they may run."""

    inputs: list[Value]
    nodes: list[Node]
    outputs: list[Value]
    rows: set[int] = field(default_factory=set)
    """For a branch for batches of a known size: the inputs that have its rows."""
    of_any_size: bool = False
    """Whether it is for batches that it or its loop takes, whatever their size."""
    taken: dict[Value, int] = field(default_factory=dict)
    """Batches of a fixed size that the graph takes from iterators, and their rows."""

    def all_nodes(self) -> Iterator[Node]:
        """All nodes, also those of loops and branches."""
        for node in self.nodes:
            yield node
            for body in node.bodies:
                yield from body.all_nodes()


def elements_of(shape: Sequence[int | None] | None) -> int | None:
    """The number of elements of a shape; None if it is not fully known."""
    if shape is None:
        return None
    count = 1
    for size in shape:
        if size is None:
            return None
        count *= size
    return count


def sizes_of(shape: Sequence[int | None] | None) -> tuple[int, ...] | None:
    """The shape if it is fully known, else None."""
    if shape is None:
        return None
    sizes = tuple(size for size in shape if size is not None)
    return sizes if len(sizes) == len(shape) else None


def python_value(message: ProtocolBuffer) -> Any:
    """The value of an ``AttrValue``: a number, bytes, a dtype, a shape, or a list."""
    kind = message.WhichOneof("value")
    if kind == "type":
        return tf.as_dtype(message.type)
    if kind == "shape":
        return tf.TensorShape(message.shape)
    if kind == "list":
        values = message.list
        for name in ("s", "i", "f", "b"):
            if elements := getattr(values, name):
                return list(elements)
        if values.type:
            return [tf.as_dtype(dtype) for dtype in values.type]
        return [tf.TensorShape(shape) for shape in values.shape] or list(values.func)
    if kind == "tensor":
        return tf.make_ndarray(message.tensor)
    return None if kind is None else getattr(message, kind)
