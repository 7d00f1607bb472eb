"""The definition of a TensorFlow function, parsed: its nodes in a possible order.

In a FunctionDef an input is written ``node:output:index``, where ``output`` is a name
of the op's definition. Here it is a node and the number of its output.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import tensorflow as tf

from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.tensor_types import ProtocolBuffer

CALLS = ("PartitionedCall", "StatefulPartitionedCall")
LOOPS = ("While", "StatelessWhile")
MUST_COMPILE = "_XlaMustCompile"
"""The attribute of functions, and of their calls, that XLA has to compile."""
BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")


class Input(NamedTuple):
    """An output of a node, or an argument, for which ``output`` is 0."""

    node: str
    output: int


@dataclass(frozen=True, slots=True)
class SourceNode:
    """A node of a function."""

    definition: ProtocolBuffer
    inputs: tuple[Input, ...]
    controls: tuple[str, ...]
    output_types: tuple[int, ...]
    is_stateful: bool


@dataclass(frozen=True, slots=True)
class Function:
    """A function. ``nodes`` are in an order in which they may run."""

    name: str
    arguments: tuple[str, ...]
    nodes: Mapping[str, SourceNode]
    outputs: tuple[Input, ...]
    must_run: tuple[str, ...]
    """Nodes that run even if no output needs them."""
    definition: ProtocolBuffer


@functools.lru_cache(maxsize=512)
def function_named(name: str) -> Function | None:
    """The registered function of this name; None if there is none."""
    definition = tf_functions.definition_of(name)
    return None if definition is None else parsed(definition)


def parsed(definition: ProtocolBuffer) -> Function:
    """Parse a FunctionDef."""
    types: dict[str, tuple[int, ...]] = {}
    starts: dict[tuple[str, str], int] = {}
    stateful: set[str] = set()
    for node in definition.node_def:
        op_def = tf_functions.op_def(node.op)
        if op_def is None:
            raise NotImplementedError(f"TensorFlow has no op {node.op}")
        if op_def.is_stateful:
            stateful.add(node.name)
        dtypes: list[int] = []
        for output, dtypes_of_output in output_types(op_def, node.attr):
            starts[node.name, output] = len(dtypes)
            dtypes += dtypes_of_output
        types[node.name] = tuple(dtypes)

    def input_of(text: str) -> Input:
        name, _, rest = text.partition(":")
        if not rest:
            return Input(name, 0)
        output, _, index = rest.partition(":")
        return Input(name, starts[name, output] + int(index or 0))

    nodes = {}
    for node in definition.node_def:
        nodes[node.name] = SourceNode(
            node,
            tuple(input_of(text) for text in node.input if text[0] != "^"),
            tuple(text[1:] for text in node.input if text[0] == "^"),
            types[node.name],
            node.name in stateful,
        )
    signature = definition.signature
    outputs = tuple(
        input_of(definition.ret[argument.name]) for argument in signature.output_arg
    )
    # Maps of protocol buffers have another order in each process.
    must_run = tuple(name for _, name in sorted(definition.control_ret.items()))
    return Function(
        signature.name,
        tuple(argument.name for argument in signature.input_arg),
        {name: nodes[name] for name in _in_order(_needed(nodes, outputs, must_run))},
        outputs,
        must_run,
        definition,
    )


def traced_shapes(function: Function, places: Sequence[int]) -> list[str]:
    """The shapes of arguments for which a function was traced, as far as it says so."""
    attributes = function.definition.arg_attr
    of_places = [attributes[place] for place in places if place in attributes]
    return [
        str(tf.TensorShape(shape))
        for attribute in of_places
        for shape in attribute.attr["_output_shapes"].list.shape
    ]


def called_function(node: ProtocolBuffer) -> str | None:
    """The name of the function that a node calls, if it is a call."""
    if node.op in CALLS:
        name: str = node.attr["f"].func.name
        return name
    is_function = tf_functions.is_function(node.op)
    return node.op if is_function else None


def op_types(function: Function) -> set[str]:
    """The types of all ops of a function, and of the functions that it calls."""
    return {node.op for node in all_nodes(function)}


def all_nodes(function: Function) -> Iterator[ProtocolBuffer]:
    """The nodes of a function, and of the functions that it calls in some way."""
    done: set[str] = set()
    todo = [function]
    while todo:
        for node in todo.pop().nodes.values():
            yield node.definition
            for name in _functions_of(node.definition):
                inner = None if name in done else function_named(name)
                done.add(name)
                if inner is not None:
                    todo.append(inner)


def _functions_of(node: ProtocolBuffer) -> Iterator[str]:
    """The names of the functions that a node calls in some way, in one order."""
    yield node.op
    for _, attribute in sorted(node.attr.items()):
        if attribute.HasField("func"):
            yield attribute.func.name
        yield from (function.name for function in attribute.list.func)


def output_types(
    op_def: ProtocolBuffer, attributes: Mapping[str, ProtocolBuffer]
) -> Iterator[tuple[str, list[int]]]:
    """The name and the dtypes (as enum values) of each output argument of an op."""

    def value(name: str) -> ProtocolBuffer:
        if name in attributes:
            return attributes[name]
        return next(a.default_value for a in op_def.attr if a.name == name)

    for argument in op_def.output_arg:
        if argument.type_list_attr:
            yield argument.name, list(value(argument.type_list_attr).list.type)
            continue
        dtype = argument.type or value(argument.type_attr).type
        number = value(argument.number_attr).i if argument.number_attr else 1
        yield argument.name, [dtype] * number


def _needed(
    nodes: Mapping[str, SourceNode], outputs: Sequence[Input], must_run: Sequence[str]
) -> Mapping[str, SourceNode]:
    """The nodes on which an output or an effect depends, in their order."""
    names = {output.node for output in outputs} | set(must_run)
    names |= {name for name, node in nodes.items() if node.is_stateful}
    todo = [name for name in names if name in nodes]
    while todo:
        for name in _needs(nodes[todo.pop()], nodes):
            if name not in names:
                names.add(name)
                todo.append(name)
    return {name: node for name, node in nodes.items() if name in names}


def _in_order(nodes: Mapping[str, SourceNode]) -> Sequence[str]:
    """The nodes' names, each after its inputs; the order stays where it can."""
    order: list[str] = []
    done: set[str] = set()
    for root in nodes:
        if root in done:
            continue
        stack: list[tuple[str, Iterator[str]]] = [(root, _needs(nodes[root], nodes))]
        open_nodes = {root}
        while stack:
            name, needs = stack[-1]
            needed = next((n for n in needs if n not in done), None)
            if needed is None:
                stack.pop()
                done.add(name)
                order.append(name)
            elif needed not in open_nodes:
                open_nodes.add(needed)
                stack.append((needed, _needs(nodes[needed], nodes)))
    return order


def _needs(node: SourceNode, nodes: Mapping[str, SourceNode]) -> Iterator[str]:
    names = (*(name for name, _ in node.inputs), *node.controls)
    return iter([name for name in names if name in nodes])
