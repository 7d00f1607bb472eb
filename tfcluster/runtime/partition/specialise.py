"""Specialises a function for inputs of known shapes; it still holds the whole batch.

Calls are inlined, and the batch is an input instead of what an iterator returns.
TensorFlow infers the shapes, and evaluates whatever depends on no input: shape
arithmetic among it, since the batch size is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import tensorflow as tf

from tfcluster.runtime.partition import lists, tf_functions
from tfcluster.runtime.partition.functions import (
    BRANCHES,
    LOOPS,
    Function,
    Input,
    SourceNode,
    called_function,
    function_named,
)
from tfcluster.runtime.partition.graph import Graph, ListType, Node, Value
from tfcluster.runtime.partition.placement import Shape
from tfcluster.runtime.tensor_types import Array, DType, Message, Tensor

_DROPPED = frozenset(
    (
        *("_output_shapes", "_class", "_XlaMustCompile", "_XlaCompile", "_XlaScope"),
        *("_XlaSeparateCompiledGradients", "_gradient_op_type", "_noinline"),
        *("_read_only_resource_inputs", "_construction_context"),
    )
)
"""Attributes that have no meaning after specialisation."""
_MOST_ROUNDS = 16
"""Of a fixed point; each makes a shape less specific."""

Path = tuple[str, ...]


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
            return cls(tensor.dtype, (), like=tensor)
        return cls(tensor.dtype, shape_of(tensor))


def specialise(
    function: Function,
    arguments: Sequence[Argument],
    fetched: Mapping[Path, Sequence[Argument]] | None = None,
) -> Graph:
    """The graph of ``function`` for these arguments.

    ``fetched`` has the outputs of nodes that are inputs now, by the nodes' paths: the
    names of the calls around them and their own. These inputs follow the others, in the
    order of ``fetched``. Raises NotImplementedError for a function that cannot be
    specialised, and what TensorFlow raises for shapes that do not fit.
    """
    whole = _Specialiser()
    values = [whole.argument(each) for each in arguments]
    peeled = {
        path: [whole.argument(each) for each in outputs]
        for path, outputs in (fetched or {}).items()
    }
    outputs, _ = whole.inline(function, values, (), (), peeled)
    return whole.finished(outputs)


def shape_of(tensor: Tensor) -> Shape | None:
    """The shape of a tensor; None if its rank is unknown."""
    return None if tensor.shape.rank is None else tuple(tensor.shape.as_list())


class _Specialiser:
    """Makes one graph; bodies of loops and branches are graphs of their own."""

    def __init__(self) -> None:
        self._graph = tf.Graph()
        self._inputs: list[Value] = []
        self._nodes: list[Node] = []
        self._pending: list[Node] = []
        self._tensors: dict[Value, Tensor] = {}
        self._names: dict[str, int] = {}

    def finished(self, outputs: Sequence[Value]) -> Graph:
        self._flush()
        return Graph(self._inputs, self._nodes, list(outputs))

    # --- values -----------------------------------------------------------------------

    def argument(self, argument: Argument) -> Value:
        """An input of the graph. Uses of a known constant do not read the input."""
        tensor = tf_functions.placeholder(
            self._graph, argument.dtype, argument.shape, argument.like
        )
        node = Node(tensor.op.name, "Placeholder", [], [], {})
        self._names[node.name] = 1
        value = Value(node, 0, argument.dtype, argument.shape, argument.list)
        node.outputs.append(value)
        self._tensors[value] = tensor
        self._inputs.append(value)
        if argument.list is not None and argument.list.begun:
            tf_functions.refer(tensor, argument.list.shape)
        if argument.constant is not None:
            return self._constant(argument.constant, argument.dtype)
        return value

    def _constant(self, array: Array, dtype: DType) -> Value:
        value = tf.make_tensor_proto(array, dtype, array.shape)
        attributes = {
            "value": tf.compat.v1.AttrValue(tensor=value),
            "dtype": tf.compat.v1.AttrValue(type=dtype.as_datatype_enum),
        }
        node = self._add("Const", [], [], attributes, [dtype], "constant")
        node.outputs[0].shape = array.shape
        node.outputs[0].constant = array
        return node.outputs[0]

    def _add(
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
        distinct = list(dict.fromkeys(controls))
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
        return node

    # --- shapes -----------------------------------------------------------------------

    def _flush(self) -> None:
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
                tensor = self._tensors[value]
                message.input.append(tensor.name)
                mapped[tensor.name] = tensor
            for key, attribute in node.attributes.items():
                message.attr[key].CopyFrom(attribute)
        tf_functions.import_nodes(self._graph, definition, mapped)
        for node, name in own.items():
            found = tf_functions.operation(self._graph, name).outputs
            for value, tensor in zip(node.outputs, found, strict=True):
                self._tensors[value] = tensor
                if value.shape is None:
                    value.shape = shape_of(tensor)
                if not value.is_handle and value.dtype != tf.string:
                    value.evaluate_by(partial(tf_functions.constant_of, tensor))
            lists.set_types(node)
        self._nodes += self._pending
        self._pending = []

    # --- nodes ------------------------------------------------------------------------

    def inline(
        self,
        function: Function,
        arguments: Sequence[Value],
        path: Path,
        waits: Sequence[Node],
        fetched: Mapping[Path, Sequence[Value]],
    ) -> tuple[list[Value], list[Node]]:
        """Add a function's nodes, whose effects come after ``waits``.

        Returns the outputs, and the nodes that what comes after the call waits for.
        """
        values = {
            name: [value]
            for name, value in zip(function.arguments, arguments, strict=True)
        }
        after: dict[str, list[Node]] = {name: [] for name in values}
        for name, source in function.nodes.items():
            inputs = [values[each.node][each.output] for each in source.inputs]
            controls = [node for each in source.controls for node in after[each]]
            here = (*path, name)
            if here in fetched:
                values[name], after[name] = list(fetched[here]), []
                continue
            if source.is_stateful:
                controls += waits
            values[name], after[name] = self._node(
                source, inputs, controls, here, fetched
            )
        tails = [node for name in function.must_run for node in after[name]]
        outputs = [values[each.node][each.output] for each in function.outputs]
        return outputs, tails or list(waits)

    def _node(
        self,
        source: SourceNode,
        inputs: list[Value],
        controls: list[Node],
        path: Path,
        fetched: Mapping[Path, Sequence[Value]],
    ) -> tuple[list[Value], list[Node]]:
        definition = source.definition
        called = called_function(definition)
        if called is not None and (function := function_named(called)) is not None:
            return self.inline(function, inputs, path, controls, fetched)
        if definition.op in LOOPS:
            return self._loop(source, inputs, controls, path)
        if definition.op in BRANCHES:
            return self._branch(source, inputs, controls, path, fetched)
        if definition.op == "ShapeN":
            return self._shapes(source, inputs, controls, path)
        known = self._known_element(definition.op, inputs)
        attributes = {k: v for k, v in definition.attr.items() if k not in _DROPPED}
        node = self._source_node(source, inputs, controls, attributes, path)
        outputs = list(node.outputs)
        if known is not None:
            outputs[-1] = known
        return outputs, [node]

    def _shapes(
        self,
        source: SourceNode,
        inputs: list[Value],
        controls: list[Node],
        path: Path,
    ) -> tuple[list[Value], list[Node]]:
        """A ``Shape`` for each input: TensorFlow evaluates no ``ShapeN``."""
        dtypes = [tf.as_dtype(each) for each in source.output_types]
        nodes = []
        for value, dtype in zip(inputs, dtypes, strict=True):
            attributes = {
                "T": tf.compat.v1.AttrValue(type=value.dtype.as_datatype_enum),
                "out_type": tf.compat.v1.AttrValue(type=dtype.as_datatype_enum),
            }
            nodes.append(
                self._add("Shape", [value], controls, attributes, [dtype], path[-1])
            )
        return [node.outputs[0] for node in nodes], nodes

    def _source_node(
        self,
        source: SourceNode,
        inputs: Sequence[Value],
        controls: Sequence[Node],
        attributes: Mapping[str, Message],
        path: Path,
    ) -> Node:
        return self._add(
            source.definition.op,
            inputs,
            controls,
            attributes,
            [tf.as_dtype(each) for each in source.output_types],
            path[-1],
            device=source.definition.device,
            stateful=source.is_stateful,
            origin=path,
        )

    def _known_element(self, op_type: str, inputs: list[Value]) -> Value | None:
        """The element that an op reads from a list, if it is known.

        If only its shape is known, the op gets it as its input.
        """
        place = lists.ELEMENT_SHAPE_INPUT.get(op_type)
        if place is None:
            return None
        if inputs[0].list is None:
            self._flush()
        known = inputs[0].list
        if known is None or not known.begun or known.dtype is None:
            return None
        if known.constant is not None and op_type == "TensorListPopBack":
            return self._constant(known.constant, known.dtype)
        if known.shape is not None:
            sizes = [-1 if size is None else size for size in known.shape]
            array = tf.make_ndarray(tf.make_tensor_proto(sizes, tf.int32))
            if inputs[place].dtype == tf.int32:
                inputs[place] = self._constant(array.reshape(-1), tf.int32)
        return None

    # --- loops and branches -----------------------------------------------------------

    def _loop(
        self,
        source: SourceNode,
        inputs: list[Value],
        controls: list[Node],
        path: Path,
    ) -> tuple[list[Value], list[Node]]:
        self._flush()
        attributes = source.definition.attr
        condition, body = (
            _require(attributes[name].func.name) for name in ("cond", "body")
        )
        stays = [
            output == Input(name, 0)
            for output, name in zip(body.outputs, body.arguments, strict=True)
        ]
        arguments = [
            Argument(
                value.dtype,
                value.shape,
                self._tensors[value] if value.is_handle else None,
                value.list,
                lists.small_constant(value) if same else None,
            )
            for value, same in zip(inputs, stays, strict=True)
        ]
        for _ in range(_MOST_ROUNDS):
            graph = _body(body, arguments, path)
            wider = [
                argument if same else _wider(argument, output)
                for argument, output, same in zip(
                    arguments, graph.outputs, stays, strict=True
                )
            ]
            if all(map(_is_same, wider, arguments)):
                break
            arguments = wider
        else:
            raise NotImplementedError(f"the shapes of {source.definition.name} vary")
        kept = _kept(attributes, arguments)
        node = self._source_node(source, inputs, controls, kept, path)
        node.bodies = (_body(condition, arguments, path), graph)
        self._flush()
        for value, argument, given in zip(node.outputs, arguments, inputs, strict=True):
            value.list = argument.list
            if argument.constant is not None:
                value.constant = argument.constant
            self._copy_handle(self._tensors[given], self._tensors[value])
            if argument.list is not None and argument.list.begun:
                tf_functions.refer(self._tensors[value], argument.list.shape)
        return list(node.outputs), [node]

    def _branch(
        self,
        source: SourceNode,
        inputs: list[Value],
        controls: list[Node],
        path: Path,
        fetched: Mapping[Path, Sequence[Value]],
    ) -> tuple[list[Value], list[Node]]:
        self._flush()
        attributes = source.definition.attr
        if "branches" in attributes:
            names = [each.name for each in attributes["branches"].list.func]
        else:
            # A case chooses by number, and 0 stands for "else" here.
            names = [
                attributes[name].func.name for name in ("else_branch", "then_branch")
            ]
        chosen, *rest = inputs
        index = chosen.constant if chosen.shape == () else None
        if index is not None and chosen.dtype != tf.string:
            number = int(index) if "branches" in attributes else int(bool(index))
            name = names[number] if 0 <= number < len(names) else names[-1]
            return self.inline(_require(name), rest, path, controls, fetched)
        arguments = [
            Argument(
                value.dtype,
                value.shape,
                self._tensors[value] if value.is_handle else None,
                value.list,
                lists.small_constant(value),
            )
            for value in rest
        ]
        bodies = [_body(_require(name), arguments, path) for name in names]
        outputs = [
            Argument(
                first.dtype,
                _common(each.shape for each in (first, *others)),
                None,
                lists.joined(each.list for each in (first, *others)),
            )
            for first, *others in zip(*(body.outputs for body in bodies), strict=True)
        ]
        kept = _kept(attributes, outputs)
        node = self._source_node(source, inputs, controls, kept, path)
        node.bodies = tuple(bodies)
        self._flush()
        for value, output in zip(node.outputs, outputs, strict=True):
            value.list = output.list
        return list(node.outputs), [node]

    def _copy_handle(self, given: Tensor, result: Tensor) -> None:
        if given.dtype in (tf.resource, tf.variant):
            data = tf_functions.handle_data(given)
            if data is not None:
                tf_functions.set_handle_data(result, data)


def _require(name: str) -> Function:
    function = function_named(name)
    if function is None:
        raise NotImplementedError(f"there is no function {name}")
    return function


def _body(function: Function, arguments: Sequence[Argument], path: Path) -> Graph:
    graph = _Specialiser()
    values = [graph.argument(each) for each in arguments]
    outputs, _ = graph.inline(function, values, path, (), {})
    return graph.finished(outputs)


def _wider(argument: Argument, output: Value) -> Argument:
    if output.is_handle:
        return replace(argument, list=lists.joined((argument.list, output.list)))
    return replace(argument, shape=lists.common_shape(argument.shape, output.shape))


def _is_same(first: Argument, second: Argument) -> bool:
    return first.shape == second.shape and lists.is_same(first.list, second.list)


def _common(shapes: Iterable[Shape | None]) -> Shape | None:
    first, *rest = shapes
    for shape in rest:
        first = lists.common_shape(first, shape)
    return first


def _kept(
    attributes: Mapping[str, Message], outputs: Sequence[Argument]
) -> Mapping[str, Message]:
    """The attributes of a loop or branch, with the shapes of its outputs."""
    kept = {k: v for k, v in attributes.items() if k not in _DROPPED}
    shapes = tf.compat.v1.AttrValue()
    for each in outputs:
        shapes.list.shape.add().CopyFrom(tf.TensorShape(each.shape).as_proto())
    kept["output_shapes"] = shapes
    return kept
