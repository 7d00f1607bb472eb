"""Which nodes of a program XLA compiles, where the script asks for that.

A function with ``jit_compile=True`` cannot be compiled as one once its ranks exchange
something. So what lies between the exchanges is compiled, in pieces. Whether XLA can do
that is known before the program runs, as all shapes are. Only what a loop does with a
batch of another size than the others is compiled when it runs, as on one machine.

On CPUs, large updates (``fused_updates``) are compiled without being asked for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import tensorflow as tf

from tfcluster.runtime import tf_internals
from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.functions import BRANCHES, LOOPS
from tfcluster.runtime.partition.graph import Node, sizes_of
from tfcluster.runtime.partition.pieces import (
    CompiledPiece,
    data_inputs,
    divided,
    tensor_types,
)
from tfcluster.runtime.partition.placement import Shape
from tfcluster.runtime.partition.rewrite import Written
from tfcluster.runtime.partition.shape_graph import shape_of
from tfcluster.runtime.tensor_types import DType, ProtocolBuffer, Tensor

_HANDLES = (tf.resource, tf.variant)
_NEVER = ("PyFunc", "EagerPyFunc", "PartitionedCall", "StatefulPartitionedCall")
"""Ops that stay between the pieces, beside collective ops."""


@dataclass(frozen=True, slots=True)
class NotCompiled:
    """A node that was to be compiled, but is not."""

    node: Node
    reason: str


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program whose pieces XLA compiles."""

    written: Written
    pieces: Sequence[CompiledPiece]
    left: Sequence[NotCompiled]


def compiled(written: Written, inputs: Sequence[Tensor]) -> Compiled:
    """The program with pieces for XLA; those of loops and branches among them.

    ``inputs`` are what it is called with, or, instead of a piece of a variable, the
    whole variable. Registers the functions of the pieces, of loops and of branches.
    """
    if not any(written.for_xla.values()):
        return Compiled(written, (), ())
    compiler = _Compiler(written)
    main, *others = written.definitions
    pairs = zip(inputs, main.signature.input_arg, strict=True)
    main = compiler.compiled(main, [_with_shape_of(*pair) for pair in pairs])
    definitions = [main, *others, *compiler.definitions]
    return Compiled(
        replace(written, definitions=definitions), compiler.pieces, compiler.left
    )


def _with_shape_of(tensor: Tensor, argument: ProtocolBuffer) -> Tensor:
    """The handle, or that of a new variable if the argument is one of another shape."""
    spec = tf_functions.variable_spec(tensor)
    if spec is None or not argument.handle_data:
        return tensor
    dtype, shape = spec
    sizes = tuple(dim.size for dim in argument.handle_data[0].shape.dim)
    if sizes == tuple(shape):
        return tensor
    with tf.variable_creator_scope(tf_internals.plain_variable):
        return tf.Variable(tf.zeros(sizes, dtype), trainable=False).handle


class _Compiler:
    def __init__(self, written: Written) -> None:
        self._written = written
        self._bodies = {d.signature.name: d for d in written.definitions[1:]}
        self._device = tf_functions.xla_device()
        self._is_on_gpu = "GPU" in self._device
        self.definitions: list[ProtocolBuffer] = []
        """Those of the pieces, and of loops and branches that call some."""
        self.pieces: list[CompiledPiece] = []
        self.left: list[NotCompiled] = []

    def compiled(
        self, definition: ProtocolBuffer, arguments: Sequence[Tensor | None]
    ) -> ProtocolBuffer:
        """A function that calls pieces, which are registered.

        ``arguments`` has the variables that it gets, as far as they are known.
        """
        name = definition.signature.name
        given = (argument.name for argument in definition.signature.input_arg)
        function = _Function(
            definition,
            self._written.for_xla.get(name, {}),
            dict(zip(given, arguments, strict=True)),
            name in self._written.of_any_size,
        )
        for name in list(function.wanted):
            reason = self._reason_against(function, function.nodes[name])
            if reason is not None:
                self._leave(function, name, reason)

        def may_compile(piece: CompiledPiece) -> bool:
            tf_functions.register(piece.definition)
            error = function.error_of(piece, self._device)
            if error is None:
                return True
            tf_functions.forget(piece.name)
            self._leave_piece(function, piece, str(error))
            return False

        calling, pieces = divided(
            definition, set(function.wanted), may_compile, function.fused
        )
        self.pieces += pieces
        self.definitions += (piece.definition for piece in pieces)
        for node in calling.node_def:
            if node.op in (*LOOPS, *BRANCHES):
                self._with_bodies(node, function)
        return calling

    def _with_bodies(self, node: ProtocolBuffer, function: _Function) -> None:
        """Let a loop or branch call pieces in its bodies."""
        carried = [text for text in node.input if text[0] != "^"]
        if node.op in BRANCHES:
            del carried[0]
        arguments = [function.arguments.get(text) for text in carried]
        for attribute in _functions_of(node):
            body = self._bodies.get(attribute.name)
            if body is None:
                continue
            before = len(self.pieces)
            calling = self.compiled(body, arguments)
            if len(self.pieces) > before:
                name = tf_functions.unique_name(attribute.name)
                calling.signature.name = attribute.name = name
                tf_functions.register(calling)
                self.definitions.append(calling)

    def _leave(self, function: _Function, name: str, reason: str) -> bool:
        """Do not compile a node; return if the script asks for it to be compiled."""
        source = function.wanted.pop(name, None)
        # Others are written for an exchange, or for a state of ours. The bodies of
        # loops and branches are compiled by themselves.
        op = function.nodes[name].op
        is_silent = op in (*_NEVER, *LOOPS, *BRANCHES) or _is_fused(source)
        if source is None or source.type != op or is_silent:
            return False
        self.left.append(NotCompiled(source, reason))
        return True

    def _leave_piece(
        self, function: _Function, piece: CompiledPiece, error: str
    ) -> None:
        """Do not compile a piece that XLA rejects."""
        at = re.search(r"\{\{node ([^}]+)\}\}", error)
        reason = error.partition("\n")[0]
        culprit = at[1] if at and at[1] in function.wanted else None
        for name in [culprit] if culprit else [node.name for node in piece.nodes]:
            if self._leave(function, name, reason):
                break

    def _reason_against(self, function: _Function, node: ProtocolBuffer) -> str | None:
        """Why a node cannot be compiled; None if it perhaps can."""
        if self._is_on_gpu and _is_fused(function.for_xla[node.name]):
            return "the script does not ask for it"
        if not self._has_kernel(node):
            return "XLA has no kernel for it"
        if not function.is_of_any_size and not function.has_known_shapes(node):
            return "a size of its inputs or results is known only when it runs"
        if node.device and node.device != function.device:
            return "it runs on another device"
        return None

    def _has_kernel(self, node: ProtocolBuffer) -> bool:
        if node.op in _NEVER or node.op.startswith("Collective"):
            return False
        if not tf_functions.has_xla_kernel(node, self._device):
            return False
        bodies = [self._bodies.get(f.name) for f in _functions_of(node)]
        return all(
            inner.name in self._written.for_xla.get(body.signature.name, {})
            and self._has_kernel(inner)
            for body in bodies
            if body is not None
            for inner in body.node_def
        )


@dataclass(slots=True)
class _Function:
    """A function, and what is known of it."""

    definition: ProtocolBuffer
    for_xla: Mapping[str, Node | None]
    arguments: Mapping[str, Tensor | None]
    """What it is called with, as far as that is known: its variables are needed."""
    is_of_any_size: bool
    """Whether it gets batches whose size is known when it runs."""
    nodes: dict[str, ProtocolBuffer] = field(init=False)
    wanted: dict[str, Node | None] = field(init=False)
    """The nodes that are to be compiled."""
    device: str = field(init=False)
    """The device of the nodes that have one."""
    _types: Mapping[str, DType] = field(init=False)
    _shapes: Mapping[str, Shape | None] = field(init=False)
    _of_unknown_shape: set[str] = field(init=False)
    """The nodes with results of unknown sizes."""

    def __post_init__(self) -> None:
        self.nodes = {node.name: node for node in self.definition.node_def}
        self.wanted = dict(self.for_xla)
        self._types = {
            text: tf_functions.dtype_of(number)
            for text, number in tensor_types(self.definition).items()
        }
        self._shapes = _shapes(self.definition, self.arguments, self._types)
        self._of_unknown_shape = {
            text.partition(":")[0] for text in self._types if self._is_unknown(text)
        }
        devices = Counter(self.nodes[name].device for name in self.wanted)
        devices.pop("", None)
        self.device = max(devices, key=lambda device: devices[device], default="")

    @property
    def fused(self) -> set[str]:
        """The nodes that are compiled although the script does not ask for it."""
        return {name for name, source in self.for_xla.items() if _is_fused(source)}

    def has_known_shapes(self, node: ProtocolBuffer) -> bool:
        """Whether the sizes of all inputs and results of a node are known.

        If those of the traced function are, so are their parts: TensorFlow does not
        tell the shapes of what is in a list that a loop carries.
        """
        source = self.for_xla[node.name]
        if source is not None and source.type == node.op:
            return all(
                value.dtype in _HANDLES
                or sizes_of(value.shape) is not None
                or value.constant is not None
                for value in (*source.inputs, *source.outputs)
            )
        return node.name not in self._of_unknown_shape and not any(
            self._is_unknown(text) for text in data_inputs(node)
        )

    def _is_unknown(self, text: str) -> bool:
        is_handle = self._types[text] in _HANDLES
        return not is_handle and sizes_of(self._shapes[text]) is None

    def error_of(self, piece: CompiledPiece, device: str) -> Exception | None:
        """Why XLA cannot compile a piece, which is registered; None if it can."""
        is_handle = [self._types[text] in _HANDLES for text in piece.inputs]
        handles = [
            self.arguments.get(text)
            for text, handle in zip(piece.inputs, is_handle, strict=True)
            if handle
        ]
        variables = [variable for variable in handles if variable is not None]
        if len(variables) < len(handles):
            return ValueError("one of its variables is known only when it runs")
        specs = [
            tf.TensorSpec(self._shapes[text], self._types[text])
            for text, handle in zip(piece.inputs, is_handle, strict=True)
            if not handle
        ]
        if not all(spec.shape.is_fully_defined() for spec in specs):
            return None
        try:
            tf_functions.lower_by_xla(piece.name, specs, variables, device)
        except tf.errors.OpError as error:
            return error
        return None


def _shapes(
    definition: ProtocolBuffer,
    arguments: Mapping[str, Tensor | None],
    types: Mapping[str, DType],
) -> dict[str, Shape | None]:
    """The shapes of all tensors of a function, by how inputs name them."""
    graph = tf.Graph()
    placeholders = tf.compat.v1.GraphDef()
    names: dict[str, str] = {}
    """The graph's names for the tensors. Names of nodes could clash with scopes."""
    for index, argument in enumerate(definition.signature.input_arg):
        node = placeholders.node.add(name=f"a{index}", op="Placeholder")
        node.attr["dtype"].type = argument.type
        attributes = definition.arg_attr[index].attr
        if "_output_shapes" in attributes:
            shape = attributes["_output_shapes"].list.shape[0]
            node.attr["shape"].shape.CopyFrom(shape)
        else:
            node.attr["shape"].shape.unknown_rank = True
        names[argument.name] = f"a{index}:0"
    tf_functions.import_nodes(graph, placeholders, {})
    for name, tensor in arguments.items():
        if tensor is not None and types[name] in _HANDLES:
            given = graph.get_tensor_by_name(names[name])
            tf_functions.copy_handle_data(tensor, given)
    read = {text for node in definition.node_def for text in data_inputs(node)}
    mapped = {
        name: graph.get_tensor_by_name(name)
        for text, name in names.items()
        if text in read
    }
    numbers = {node.name: f"n{i}" for i, node in enumerate(definition.node_def)}
    counts = Counter[str]()
    for text in types:
        if text not in names:
            name = numbers[text.partition(":")[0]]
            names[text] = f"{name}:{counts[name]}"
            counts[name] += 1
    nodes = tf.compat.v1.GraphDef()
    for source in definition.node_def:
        node = nodes.node.add()
        node.CopyFrom(source)
        node.name = numbers[source.name]
        del node.input[:]
        node.input.extend(names[text] for text in data_inputs(source))
    tf_functions.import_nodes(graph, nodes, mapped)
    return {
        text: shape_of(graph.get_tensor_by_name(name)) for text, name in names.items()
    }


def _is_fused(source: Node | None) -> bool:
    return source is not None and not source.for_xla


def _functions_of(node: ProtocolBuffer) -> Iterator[ProtocolBuffer]:
    """The attributes that name a function."""
    for attribute in node.attr.values():
        if attribute.HasField("func"):
            yield attribute.func
        yield from attribute.list.func
