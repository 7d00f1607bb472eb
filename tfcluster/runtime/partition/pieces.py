"""Cuts a function into pieces that XLA compiles, between what it cannot compile.

A cut is a node that no piece may hold, such as an exchange. The stage of a node is the
largest number of cuts, with work between them, on any path to it. Each stage is divided
further by the first exchange that needs its nodes: so an exchange of the last layer's
gradients begins while those of the first layers are computed. What no exchange needs is
divided by the last exchange that it needs: so weights whose gradients are there are
updated while others are exchanged. The state of an optimizer is read and computed in
the stage that uses it, since pieces copy what they hand on. Along each edge no number
falls, so pieces need each other in one direction only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeAlias

import tensorflow as tf

from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.functions import LOOPS, MUST_COMPILE, output_types
from tfcluster.runtime.tensor_types import ProtocolBuffer

_CONTRACTIONS = ("MatMul", "BatchMatMul", "SparseMatMul", "Einsum", "Conv", "Depthwise")
_LEAST_NODES = 8
"""Of a piece without large nodes, products, convolutions and loops, since a call of XLA
has a price, and without random numbers, of which XLA draws others."""

_Stage: TypeAlias = tuple[int, int, int]
"""A number of cuts, the number of the first exchange after the node, and, if there
is none, that of the last exchange before it."""


@dataclass(frozen=True, eq=False, slots=True)
class CompiledPiece:
    """Nodes of a function that XLA compiles together, as a function of their own."""

    definition: ProtocolBuffer
    nodes: list[ProtocolBuffer]
    inputs: list[str]
    """What the piece's arguments are in the function."""
    outputs: list[str]
    """What the piece returns in the function."""
    is_stateful: bool

    @property
    def name(self) -> str:
        name: str = self.definition.signature.name
        return name

    @property
    def call(self) -> str:
        """The name of the node that calls the piece."""
        return f"piece_{self.name.rpartition('_')[2]}"


def divided(
    definition: ProtocolBuffer,
    can_compile: AbstractSet[str],
    may_compile: Callable[[CompiledPiece], bool] = lambda piece: True,
    large: AbstractSet[str] = frozenset(),
) -> tuple[ProtocolBuffer, list[CompiledPiece]]:
    """The function, which calls the pieces, and the definitions of these.

    Inputs of a node come before it in ``definition``. Nodes whose names are not in
    ``can_compile`` stay in the function, and so do those of pieces that
    ``may_compile`` rejects. The nodes in ``large`` take longer than a call of XLA.
    """
    types = tensor_types(definition)
    groups = _groups(definition, can_compile, types)
    pieces = {}
    for number, nodes in enumerate(groups):
        if not _is_worth_it(nodes, large):
            continue
        piece = _piece(
            definition, nodes, f"{definition.signature.name}_{number}", types
        )
        if may_compile(piece):
            pieces[number] = piece
    return _calling(definition, list(pieces.values()), types), list(pieces.values())


# --- which nodes ----------------------------------------------------------------------


def stages(
    needs: Mapping[str, Iterable[str]],
    can_compile: AbstractSet[str],
    exchanges: AbstractSet[str],
) -> dict[str, _Stage]:
    """The stage of each node.

    ``needs`` has all nodes in an order in which they may run, each with the nodes that
    run before it.
    """
    cuts: dict[str, int] = {}
    behind: dict[str, int] = {}
    """The number of the last exchange before each node, or its own; from 1 on."""
    number = 0
    for name, needed in needs.items():
        if name in can_compile:
            before = (cuts[n] + (n not in can_compile) for n in needed)
            cuts[name] = max((1, *before))
        else:
            cuts[name] = max((0, *(cuts[n] for n in needed)))
        if name in exchanges:
            number += 1
            behind[name] = number
        else:
            behind[name] = max((0, *(behind[n] for n in needed)))
    none = len(exchanges)
    first = dict.fromkeys(needs, none)
    number = none
    for name in reversed(list(needs)):
        if name in exchanges:
            number -= 1
            first[name] = min(first[name], number)
        for needed in needs[name]:
            first[needed] = min(first[needed], first[name])
    latest: dict[str, tuple[int, int]] = {}
    """The largest numbers with which a node delays none of those that need it."""
    for name in reversed(list(needs)):
        own_cuts, own_behind = latest.setdefault(name, (cuts[name], behind[name]))
        for needed in needs[name]:
            least = own_cuts - (name in can_compile and needed not in can_compile)
            so_far = latest.get(needed, (least, own_behind))
            latest[needed] = min(so_far[0], least), min(so_far[1], own_behind)
    return {
        name: (cuts[name], first[name], 0)
        if first[name] < none
        else (latest[name][0], none, latest[name][1])
        for name in needs
    }


def _groups(
    definition: ProtocolBuffer,
    can_compile: AbstractSet[str],
    types: Mapping[str, int],
) -> list[list[ProtocolBuffer]]:
    """The nodes that may be compiled, by their stages."""
    nodes = {node.name: node for node in definition.node_def if node.op != "Const"}
    waits = _waits_of_constants(definition)
    needs = {name: list(_needs(node, nodes, waits)) for name, node in nodes.items()}
    exchanges = {name for name, node in nodes.items() if _is_exchange(node)}
    allowed = can_compile & nodes.keys()
    while True:
        stage_of = stages(needs, allowed, exchanges)
        torn = _torn(definition, stage_of, allowed, types)
        if not torn:
            break
        allowed -= torn
    groups: dict[_Stage, list[ProtocolBuffer]] = {}
    for name, node in nodes.items():
        if name in allowed:
            groups.setdefault(stage_of[name], []).append(node)
    return list(groups.values())


def _torn(
    definition: ProtocolBuffer,
    stage_of: Mapping[str, _Stage],
    allowed: AbstractSet[str],
    types: Mapping[str, int],
) -> set[str]:
    """Nodes with handles that XLA cannot hand from piece to piece, such as lists.

    Only variables that are arguments of the function can be inputs of a piece.
    """
    torn: set[str] = set()
    results = set(definition.ret.values())
    uses: dict[str, list[str]] = {}
    for node in definition.node_def:
        for text in data_inputs(node):
            if types[text] in _HANDLES:
                uses.setdefault(text, []).append(node.name)
    for text in types:
        if types[text] not in _HANDLES:
            continue
        maker, users = _node_of(text), uses.get(text, [])
        if not maker and types[text] == _RESOURCE:
            continue
        stages_of_users = {stage_of.get(name) for name in users}
        together = (
            maker in allowed
            and allowed >= set(users)
            and stages_of_users <= {stage_of[maker]}
            and text not in results
        )
        if not together:
            torn |= allowed & {maker, *users}
    return torn


_RESOURCE = tf.resource.as_datatype_enum
_HANDLES = (_RESOURCE, tf.variant.as_datatype_enum)


def _is_exchange(node: ProtocolBuffer) -> bool:
    return node.op == "PyFunc" or node.op.startswith("Collective")


def _is_worth_it(nodes: Sequence[ProtocolBuffer], large: AbstractSet[str]) -> bool:
    computing = [node for node in nodes if node.op != "ReadVariableOp"]
    return (
        len(nodes) >= _LEAST_NODES
        or (len(computing) > 1 and any(node.name in large for node in computing))
        or any(
            node.op.startswith(_CONTRACTIONS) or node.op in LOOPS or "Random" in node.op
            for node in nodes
        )
    )


# --- what is written ------------------------------------------------------------------


def _piece(
    definition: ProtocolBuffer,
    nodes: list[ProtocolBuffer],
    name: str,
    types: Mapping[str, int],
) -> CompiledPiece:
    function = tf.compat.v1.GraphDef().library.function.add()
    function.attr[MUST_COMPILE].b = True
    signature = function.signature
    signature.name = name
    own = {node.name for node in nodes}
    constants = {node.name: node for node in definition.node_def if node.op == "Const"}
    read = dict.fromkeys(text for node in nodes for text in data_inputs(node))
    for maker in dict.fromkeys(map(_node_of, read)):
        if maker in constants:
            constant = function.node_def.add()
            constant.CopyFrom(constants[maker])
            # Constants wait for nothing: the nodes that use them wait in their place.
            del constant.input[:]
    outer = [text for text in read if _node_of(text) not in own | constants.keys()]
    # TensorFlow wants the variables behind the numbers.
    outer.sort(key=lambda text: types[text] in _HANDLES)
    given = {argument.name: argument for argument in definition.signature.input_arg}
    arguments: dict[str, str] = {}
    for text in outer:
        argument = signature.input_arg.add()
        argument.name = arguments[text] = f"argument_{len(arguments)}"
        argument.type = types[text]
        if text in given:
            argument.handle_data.extend(given[text].handle_data)
    waits_of_constants = _waits_of_constants(definition)
    is_stateful = False
    for node in nodes:
        copied = function.node_def.add()
        copied.CopyFrom(node)
        del copied.input[:]
        copied.input.extend(arguments.get(text, text) for text in data_inputs(node))
        waits = _waits(node, waits_of_constants)
        copied.input.extend(f"^{wait}" for wait in waits if wait in own)
        op_def = tf_functions.op_def(node.op)
        if op_def is not None and op_def.is_stateful:
            is_stateful = True
            signature.control_output.append(node.name)
            function.control_ret[node.name] = node.name
    signature.is_stateful = is_stateful
    outputs: list[str] = []
    others = (node for node in definition.node_def if node.name not in own)
    read_by_others = [text for node in others for text in data_inputs(node)]
    for text in dict.fromkeys((*read_by_others, *definition.ret.values())):
        if _node_of(text) in own:
            output = signature.output_arg.add()
            output.name = f"output_{len(outputs)}"
            output.type = types[text]
            function.ret[output.name] = text
            outputs.append(text)
    return CompiledPiece(function, nodes, outer, outputs, is_stateful)


def _calling(
    definition: ProtocolBuffer,
    pieces: Sequence[CompiledPiece],
    types: Mapping[str, int],
) -> ProtocolBuffer:
    """The function, with a call in place of the nodes of each piece."""
    function = tf.compat.v1.GraphDef().library.function.add()
    function.CopyFrom(definition)
    del function.node_def[:]
    calls = {node.name: piece.call for piece in pieces for node in piece.nodes}
    texts = {
        text: f"{piece.call}:output:{place}"
        for piece in pieces
        for place, text in enumerate(piece.outputs)
    }
    waits_of_constants = _waits_of_constants(definition)

    def connect(
        new: ProtocolBuffer, data: Iterable[str], old: Iterable[ProtocolBuffer]
    ) -> None:
        """Let a new node read what is named so, and wait as the old nodes do."""
        waits = (w for node in old for w in _waits(node, waits_of_constants))
        controls = dict.fromkeys(calls.get(wait, wait) for wait in waits)
        new.input.extend(texts.get(text, text) for text in data)
        new.input.extend(f"^{name}" for name in controls if name != new.name)

    for node in definition.node_def:
        if node.name not in calls:
            copied = function.node_def.add()
            copied.CopyFrom(node)
            del copied.input[:]
            connect(copied, data_inputs(node), [] if node.op == "Const" else [node])
    for piece in pieces:
        call = function.node_def.add()
        call.name = piece.call
        call.op = "StatefulPartitionedCall" if piece.is_stateful else "PartitionedCall"
        call.device = next((n.device for n in piece.nodes if n.device), "")
        connect(call, piece.inputs, piece.nodes)
        call.attr[MUST_COMPILE].b = True
        call.attr["f"].func.name = piece.name
        for key, tensors in (("Tin", piece.inputs), ("Tout", piece.outputs)):
            call.attr[key].list.SetInParent()
            call.attr[key].list.type.extend(types[text] for text in tensors)
    for label, text in definition.ret.items():
        function.ret[label] = texts.get(text, text)
    for label, name in definition.control_ret.items():
        function.control_ret[label] = calls.get(name, name)
    return function


# --- the parts of a definition --------------------------------------------------------


def tensor_types(definition: ProtocolBuffer) -> dict[str, int]:
    """The dtypes of all arguments and node outputs, by how inputs name them."""
    types = {
        argument.name: argument.type for argument in definition.signature.input_arg
    }
    for node in definition.node_def:
        op_def = tf_functions.op_def(node.op)
        assert op_def is not None, node.op
        for output, dtypes in output_types(op_def, node.attr):
            for index, dtype in enumerate(dtypes):
                types[f"{node.name}:{output}:{index}"] = dtype
    return types


def data_inputs(node: ProtocolBuffer) -> Iterator[str]:
    return (text for text in node.input if text[0] != "^")


def _controls(node: ProtocolBuffer) -> Iterator[str]:
    return (text[1:] for text in node.input if text[0] == "^")


def _node_of(text: str) -> str:
    """The node that makes a tensor; empty for an argument."""
    name, colon, _ = text.partition(":")
    return name if colon else ""


def _needs(
    node: ProtocolBuffer,
    nodes: Mapping[str, ProtocolBuffer],
    waits_of_constants: Mapping[str, Sequence[str]],
) -> Iterator[str]:
    """The nodes that run before a node, but for constants."""
    for text in data_inputs(node):
        if _node_of(text) in nodes:
            yield _node_of(text)
    yield from _waits(node, waits_of_constants)


def _waits(
    node: ProtocolBuffer, waits_of_constants: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """The nodes for which a node waits, but for constants."""
    for wait in _controls(node):
        yield from waits_of_constants.get(wait, (wait,))


def _waits_of_constants(definition: ProtocolBuffer) -> dict[str, Sequence[str]]:
    """For each constant, for what those have to wait that wait for it."""
    waits: dict[str, Sequence[str]] = {}
    for node in definition.node_def:
        if node.op == "Const":
            controls = _controls(node)
            waits[node.name] = [n for w in controls for n in waits.get(w, (w,))]
    return waits
