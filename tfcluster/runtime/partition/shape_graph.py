"""A graph in the making, of which TensorFlow infers the shapes, but not those in lists.

TensorFlow forgets the shapes of elements that a loop writes to a TensorList, and every
value that a list has held. Gradients of loops push shapes as well as data, so that both
matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import tensorflow as tf

from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.graph import ListType, Node, OpGraph, Value
from tfcluster.runtime.partition.placement import Shape
from tfcluster.runtime.tensor_types import Array, DType, ProtocolBuffer, Tensor

ELEMENT_SHAPE_INPUT = {
    "TensorListGetItem": 2,
    "TensorListPopBack": 1,
    "TensorListStack": 1,
    "TensorListGather": 2,
}
"""The input with the elements' shape, of ops that read a list."""
NEW_LISTS = ("TensorListReserve", "EmptyTensorList")
_PASS = ("ZerosLike", "Identity", "AddN", "StopGradient", "IdentityN")
_DRAWS = "StatelessRandom"
"""The beginning of the names of ops that draw numbers, or make keys of generators."""
_OF_SHAPES = ("Shape", "Size", "Rank")
"""Ops that depend only on the shapes of their inputs."""


def set_types(node: Node) -> None:
    """Set ``Value.list`` of the outputs of a node that handles lists."""
    if node.type == "TensorListLength":
        list_type = node.inputs[0].list
        if list_type is not None and list_type.length is not None:
            node.outputs[0].constant = np.array(list_type.length, np.int32)
        return
    if node.outputs and node.outputs[0].is_handle:
        list_type = _type_of(node)
        if list_type is not None:
            node.outputs[0].list = list_type


def _type_of(node: Node) -> ListType | None:
    inputs = node.inputs
    if node.type in NEW_LISTS:
        length = 0 if node.type == "EmptyTensorList" else _integer(inputs[1])
        return ListType(node.attribute("element_dtype"), length=length)
    if node.type == "TensorListFromTensor":
        shape = inputs[0].shape
        if not shape:
            return ListType(inputs[0].dtype, begun=True)
        return ListType(inputs[0].dtype, shape[1:], shape[0], begun=True)
    list_type = inputs[0].list if inputs else None
    if list_type is None:
        return None
    if node.type == "TensorListSetItem":
        if node.attribute("resize_if_index_out_of_bounds"):
            list_type = replace(list_type, length=None)
        return with_element(list_type, inputs[2])
    if node.type == "TensorListPushBack":
        length = None if list_type.length is None else list_type.length + 1
        return with_element(replace(list_type, length=length), inputs[1])
    if node.type == "TensorListPopBack":
        length = list_type.length - 1 if list_type.length else None
        return replace(list_type, length=length)
    if node.type == "TensorListResize":
        return replace(list_type, length=_integer(inputs[1]))
    if node.type in _PASS:
        # Zeros are of the same shapes, but not of the same values.
        list_type = joined(value.list for value in inputs)
        if list_type is None or node.type in ("Identity", "StopGradient"):
            return list_type
        return replace(list_type, constant=None)
    if node.type.startswith("TensorList"):
        return ListType(list_type.dtype, begun=True)
    return None


def with_element(list_type: ListType, value: Value) -> ListType:
    """The type of the list with an element more."""
    constant = None if value.is_handle else small_constant(value)
    if not list_type.begun:
        return replace(list_type, shape=value.shape, begun=True, constant=constant)
    return replace(
        list_type,
        shape=common_shape(list_type.shape, value.shape),
        constant=list_type.constant if _same(list_type.constant, constant) else None,
    )


def joined(types: Iterable[ListType | None]) -> ListType | None:
    """The type of a list that is one of several; None if one of them is unknown."""
    joined_type, *others = types
    for list_type in others:
        if joined_type is None or list_type is None:
            return None
        joined_type = _joined(joined_type, list_type)
    return joined_type


def _joined(first: ListType, second: ListType) -> ListType:
    length = first.length if first.length == second.length else None
    if not first.begun or not second.begun:
        begun = second if second.begun else first
        return replace(begun, length=length)
    return replace(
        first,
        shape=common_shape(first.shape, second.shape),
        length=length,
        constant=first.constant if _same(first.constant, second.constant) else None,
    )


def is_same(first: ListType | None, second: ListType | None) -> bool:
    """Whether two types are equal."""
    if first is None or second is None:
        return first is second
    return (
        (first.shape, first.length, first.begun)
        == (second.shape, second.length, second.begun)
        and (first.constant is None) == (second.constant is None)
        and (first.constant is None or _same(first.constant, second.constant))
    )


def common_shape(first: Shape | None, second: Shape | None) -> Shape | None:
    """The most specific shape that both shapes have."""
    if first is None or second is None or len(first) != len(second):
        return None
    return tuple(a if a == b else None for a, b in zip(first, second, strict=True))


def small_constant(value: Value) -> Array | None:
    """The constant of a value that may be a shape or an index."""
    if not (value.dtype.is_integer or value.dtype.is_bool):
        return None
    if value.shape is None or len(value.shape) > 1:
        return None
    constant = value.constant
    return constant if constant is not None and constant.size <= _SMALL else None


_SMALL = 8192


def _same(first: Array | None, second: Array | None) -> bool:
    return (
        first is not None
        and second is not None
        and first.dtype == second.dtype
        and np.array_equal(first, second)
    )


def _integer(value: Value) -> int | None:
    constant = value.constant
    if constant is None or constant.size != 1:
        return None
    return int(constant.reshape(-1)[0])


Path = tuple[str, ...]
"""The names of the calls around a node of a function, and its own."""


@dataclass(frozen=True, slots=True)
class Argument:
    """What is known of an input of a function."""

    dtype: DType
    shape: Shape | None
    like: Tensor | None = None
    """A tensor of which a handle has the type."""
    list: ListType | None = None
    constant: Array | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> Argument:
        """The argument for a tensor with a value."""
        if tensor.dtype in (tf.resource, tf.variant):
            return cls(tensor.dtype, shape_of(tensor), like=tensor)
        return cls(tensor.dtype, shape_of(tensor))


def shape_of(tensor: Tensor) -> Shape | None:
    """The shape of a tensor; None if its rank is unknown."""
    return None if tensor.shape.rank is None else tuple(tensor.shape.as_list())


class ShapeGraph:
    """Collects nodes, and infers the shapes of those that were added last."""

    def __init__(self) -> None:
        self._graph = tf.Graph()
        self._inputs: list[Value] = []
        self._nodes: list[Node] = []
        self._pending: list[Node] = []
        self._constants: set[Node] = set()
        """The nodes that depend on no input."""
        self._drawn: set[Node] = set()
        """Those whose values depend on draws that are for XLA: from the same seed, it
        makes other numbers than TensorFlow's kernels, by which constants are known."""
        self.tensors: dict[Value, Tensor] = {}
        self.instead: dict[Node, Node] = {}
        """For nodes that others only wait for: what these can wait for instead."""
        self.for_xla = False
        """Whether XLA is to compile the nodes that are added now."""
        self._names: dict[str, int] = {}

    def finished(self, outputs: Sequence[Value]) -> OpGraph:
        self.flush()
        before: set[Node] = set()
        for node in self._nodes:
            for index, control in enumerate(node.controls):
                if (instead := self.instead.get(control)) in before:
                    node.controls[index] = instead
            before.add(node)
        return OpGraph(self._inputs, self._nodes, list(outputs))

    # --- values -----------------------------------------------------------------------

    def arguments(self, arguments: Sequence[Argument]) -> list[Value]:
        """Inputs of the graph. Uses of a known constant do not read its input."""
        first = len(self._inputs)
        names = [f"argument_{first + i}" for i in range(len(arguments))]
        definition = tf.compat.v1.GraphDef()
        for name, argument in zip(names, arguments, strict=True):
            node = definition.node.add(name=name, op="Placeholder")
            node.attr["dtype"].type = argument.dtype.as_datatype_enum
            shape = tf.TensorShape(argument.shape).as_proto()
            node.attr["shape"].shape.CopyFrom(shape)
        # One call for all of them, since each call takes about a millisecond.
        tf_functions.import_nodes(self._graph, definition, {})
        return [self._argument(*pair) for pair in zip(names, arguments, strict=True)]

    def _argument(self, name: str, argument: Argument) -> Value:
        tensor = tf_functions.operation(self._graph, name).outputs[0]
        if argument.like is not None:
            tf_functions.copy_handle_data(argument.like, tensor)
        node = Node(name, "Placeholder", [], [], {})
        self._names[name] = 1
        value = Value(node, 0, argument.dtype, argument.shape, argument.list)
        node.outputs.append(value)
        self.tensors[value] = tensor
        self._inputs.append(value)
        if argument.list is not None and argument.list.begun:
            tf_functions.refer(tensor, argument.list.shape)
        if argument.constant is not None:
            return self.constant(argument.constant, argument.dtype)
        return value

    def constant(self, array: Array, dtype: DType) -> Value:
        value = tf.make_tensor_proto(array, dtype, array.shape)
        attributes = {
            "value": tf.compat.v1.AttrValue(tensor=value),
            "dtype": tf.compat.v1.AttrValue(type=dtype.as_datatype_enum),
        }
        node = self.add("Const", [], [], attributes, [dtype], "constant")
        node.outputs[0].shape = array.shape
        node.outputs[0].constant = array
        return node.outputs[0]

    def add(
        self,
        op_type: str,
        inputs: Sequence[Value],
        controls: Iterable[Node],
        attributes: Mapping[str, ProtocolBuffer],
        dtypes: Sequence[DType],
        name: str,
        *,
        device: str = "",
        stateful: bool = False,
        origin: Path = (),
    ) -> Node:
        number = self._names.get(name, 0)
        self._names[name] = number + 1
        if number:
            name = f"{name}__{number}"
            self._names[name] = 1
        # TensorFlow lets an op wait by waiting with its constants, which do not run.
        behind = [
            c for v in inputs if v.node in self._constants for c in v.node.controls
        ]
        distinct = list(dict.fromkeys([*controls, *behind]))
        node = Node(
            name,
            op_type,
            list(inputs),
            distinct,
            attributes,
            device,
            stateful,
            origin,
            for_xla=self.for_xla,
        )
        node.outputs = [Value(node, i, dtype) for i, dtype in enumerate(dtypes)]
        self._pending.append(node)
        if (self.for_xla and op_type.startswith(_DRAWS)) or (
            op_type not in _OF_SHAPES and any(v.node in self._drawn for v in inputs)
        ):
            self._drawn.add(node)
        if not stateful and all(value.node in self._constants for value in inputs):
            self._constants.add(node)
        return node

    def ensure_shape(self, value: Value, shape: Shape, name: str) -> Node:
        """Note the shape of a value of which TensorFlow infers none."""
        value.shape = shape
        kept = {
            "T": tf.compat.v1.AttrValue(type=value.dtype.as_datatype_enum),
            "shape": tf.compat.v1.AttrValue(shape=tf.TensorShape(shape).as_proto()),
        }
        return self.add("EnsureShape", [value], [], kept, [value.dtype], name)

    # --- shapes -----------------------------------------------------------------------

    def flush(self) -> None:
        """Let TensorFlow infer the shapes of the nodes that were added last."""
        if not self._pending:
            return
        definition = tf.compat.v1.GraphDef()
        # Numbers, since TensorFlow changes a name that is also the name of a scope.
        first = len(self._nodes)
        own = {node: f"n{first + i}" for i, node in enumerate(self._pending)}
        mapped: dict[str, Tensor] = {}
        for node, name in own.items():
            message = definition.node.add()
            message.name, message.op = name, node.type
            for value in node.inputs:
                if value.node in own:
                    message.input.append(f"{own[value.node]}:{value.index}")
                    continue
                tensor = self.tensors[value]
                message.input.append(tensor.name)
                mapped[tensor.name] = tensor
            for key, attribute in node.attributes.items():
                message.attr[key].CopyFrom(attribute)
        tf_functions.import_nodes(self._graph, definition, mapped)
        for node, name in own.items():
            tensors = tf_functions.operation(self._graph, name).outputs
            for value, tensor in zip(node.outputs, tensors, strict=True):
                self.tensors[value] = tensor
                if value.shape is None:
                    value.shape = shape_of(tensor)
                is_data = not value.is_handle and value.dtype != tf.string
                if is_data and node not in self._drawn:
                    value.evaluate_by(partial(tf_functions.constant_of, tensor))
            set_types(node)
        self._nodes += self._pending
        self._pending = []
