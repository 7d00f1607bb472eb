"""Finds ops of a function that race: what they do to a resource has no order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations

import tensorflow as tf

from tfcluster.runtime.partition.functions import (
    Function,
    SourceNode,
    function_named,
    parsed,
)
from tfcluster.runtime.tensor_types import ProtocolBuffer

READS = {
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
    "VarIsInitializedOp",
    "VariableShape",
    "LookupTableFindV2",
    "LookupTableSizeV2",
}
_PASSES_ON = {"Identity", "IdentityN", "While", "StatelessWhile"}


@dataclass
class _Uses:
    """What a function does to a resource: the nodes that use it, and how."""

    nodes: list[str] = field(default_factory=list)
    writers: set[str] = field(default_factory=set)


_UsesByFunction = dict[str, dict[str, _Uses]]
"""By the name of a function: the uses of each argument that is a resource."""


def races(definition: ProtocolBuffer) -> list[str]:
    """Pairs of ops without an order, one of which writes what the other one uses."""
    pairs: list[str] = []
    uses: _UsesByFunction = {}
    checked: set[str] = set()
    waiting = [parsed(definition)]
    while waiting:
        function = waiting.pop()
        if function.name in checked:
            continue
        checked.add(function.name)
        pairs += _races_within(function, uses)
        for node in function.nodes.values():
            waiting += _inner(node)
    return pairs


def _races_within(function: Function, uses_by: _UsesByFunction) -> Iterator[str]:
    before = _ancestors(function)
    for name, uses in _uses(function, uses_by).items():
        for one, other in combinations(uses.nodes, 2):
            ordered = one in before[other] or other in before[one]
            if not ordered and not uses.writers.isdisjoint((one, other)):
                yield f"{function.name}: {one}, {other} of {name}"


def _uses(function: Function, uses_by: _UsesByFunction) -> dict[str, _Uses]:
    """The uses of each argument that is a resource.

    Loops within loops name a function many times: it is examined once.
    """
    if function.name not in uses_by:
        uses_by[function.name] = _examined(function, uses_by)
    return uses_by[function.name]


def _examined(function: Function, uses_by: _UsesByFunction) -> dict[str, _Uses]:
    roots = {
        (each.name, 0): each.name
        for each in function.definition.signature.input_arg
        if each.type == tf.resource.as_datatype_enum
    }
    uses_of = {name: _Uses() for name in roots.values()}
    for name, node in function.nodes.items():
        for place, value in enumerate(node.inputs):
            root = roots.get((value.node, value.output))
            if root is None:
                continue
            if node.definition.op in _PASSES_ON:
                roots[name, place] = root
            if node.definition.op.startswith("Identity"):
                continue
            uses = uses_of[root]
            if name not in uses.nodes:
                uses.nodes.append(name)
            if _writes(node, place, uses_by):
                uses.writers.add(name)
    return uses_of


def _writes(node: SourceNode, place: int, uses_by: _UsesByFunction) -> bool:
    functions = list(_inner(node))
    if not functions:
        return node.definition.op not in READS
    arguments = [f.definition.signature.input_arg for f in functions]
    for function, given in zip(functions, arguments, strict=True):
        own = place - (len(node.inputs) - len(given))
        if own >= 0 and _uses(function, uses_by)[given[own].name].writers:
            return True
    return False


def _inner(node: SourceNode) -> Iterator[Function]:
    for attribute in node.definition.attr.values():
        for each in (attribute.func, *attribute.list.func):
            function = function_named(each.name) if each.name else None
            if function is not None:
                yield function


def _ancestors(function: Function) -> dict[str, set[str]]:
    """By node, all nodes that it waits for."""
    found: dict[str, set[str]] = {}
    for name, node in function.nodes.items():
        direct = {*(each.node for each in node.inputs), *node.controls}
        direct &= found.keys()
        found[name] = direct.union(*(found[each] for each in direct))
    return found
