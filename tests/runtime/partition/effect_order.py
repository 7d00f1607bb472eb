"""Finds ops of a function that race: what they do to a resource has no order."""

from __future__ import annotations

import functools
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


def races(definition: ProtocolBuffer) -> list[str]:
    """Pairs of ops without an order, one of which writes what the other one uses."""
    found = []
    function = parsed(definition)
    before = _ancestors(function)
    for name, uses in _resources(function).items():
        for one, other in combinations(uses.nodes, 2):
            ordered = one in before[other] or other in before[one]
            if not ordered and not uses.writers.isdisjoint((one, other)):
                found.append(f"{definition.signature.name}: {one}, {other} of {name}")
    for node in function.nodes.values():
        for inner in _inner(node):
            found += races(inner.definition)
    return found


def _resources(function: Function) -> dict[str, _Uses]:
    """The uses of each argument that is a resource."""
    signature = function.definition.signature
    roots = {
        (each.name, 0): each.name
        for each in signature.input_arg
        if each.type == tf.resource.as_datatype_enum
    }
    found = {name: _Uses() for name in roots.values()}
    for name, node in function.nodes.items():
        for place, value in enumerate(node.inputs):
            root = roots.get((value.node, value.output))
            if root is None:
                continue
            if node.definition.op in _PASSES_ON:
                roots[name, place] = root
            if node.definition.op.startswith("Identity"):
                continue
            uses = found[root]
            if name not in uses.nodes:
                uses.nodes.append(name)
            if _writes(node, place):
                uses.writers.add(name)
    return found


@functools.cache
def _resources_of(name: str) -> dict[str, _Uses]:
    function = function_named(name)
    assert function is not None
    return _resources(function)


def _writes(node: SourceNode, place: int) -> bool:
    functions = list(_inner(node))
    if not functions:
        return node.definition.op not in READS
    arguments = [f.definition.signature.input_arg for f in functions]
    for function, given in zip(functions, arguments, strict=True):
        own = place - (len(node.inputs) - len(given))
        if own >= 0 and _resources_of(function.name)[given[own].name].writers:
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
