"""A graph in the making, of which TensorFlow infers the shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import tensorflow as tf

from tfcluster.runtime.partition import lists, tf_functions
from tfcluster.runtime.partition.graph import Graph, ListType, Node, Value
from tfcluster.runtime.partition.placement import Shape
from tfcluster.runtime.tensor_types import Array, DType, Message, Tensor

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
        self.tensors: dict[Value, Tensor] = {}
        self._names: dict[str, int] = {}

    def finished(self, outputs: Sequence[Value]) -> Graph:
        self.flush()
        return Graph(self._inputs, self._nodes, list(outputs))

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
        return [self._argument(*each) for each in zip(names, arguments, strict=True)]

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
        attributes: Mapping[str, Message],
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
        )
        node.outputs = [Value(node, i, dtype) for i, dtype in enumerate(dtypes)]
        self._pending.append(node)
        if not stateful and all(value.node in self._constants for value in inputs):
            self._constants.add(node)
        return node

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
            found = tf_functions.operation(self._graph, name).outputs
            for value, tensor in zip(node.outputs, found, strict=True):
                self.tensors[value] = tensor
                if value.shape is None:
                    value.shape = shape_of(tensor)
                if not value.is_handle and value.dtype != tf.string:
                    value.evaluate_by(partial(tf_functions.constant_of, tensor))
            lists.set_types(node)
        self._nodes += self._pending
        self._pending = []
