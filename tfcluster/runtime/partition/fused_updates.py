"""Which nodes update large variables, and are compiled by XLA for that. Pure.

An optimizer such as Adam reads and writes memory of a weight's size in each of a dozen
ops, and every rank updates all weights. Compiled, it reads and writes each number once.
"""

from __future__ import annotations

import tensorflow as tf

from tfcluster.runtime.partition.graph import Node, Value
from tfcluster.runtime.partition.placed import Placed
from tfcluster.runtime.partition.placement import HandleOf, is_whole
from tfcluster.runtime.partition.variable_placements import is_assignment

LEAST_BYTES = 4 << 20
"""Several smaller variables fit into a cache, and XLA takes a while to begin."""
_ARITHMETIC = frozenset(
    (
        *("Add", "AddV2", "AddN", "Sub", "Mul", "RealDiv", "Div", "DivNoNan", "Neg"),
        *("Sqrt", "Rsqrt", "Square", "SquaredDifference", "Abs", "Identity"),
    )
)
"""Ops that XLA computes as TensorFlow does, infinities and NaNs as well. Only the last
bits differ, where it rounds once after a product and a sum."""
_DTYPES = (tf.float32, tf.float64)


def fused_updates(placed: Placed) -> set[Node]:
    """The nodes of a graph, without its bodies, that XLA is to compile.

    They assign large variables, or compute by elements what is assigned to them. They
    have all elements, or a rank's piece of an optimizer's variable, but no terms of a
    sum: which nodes add terms depends on the number of ranks in a process.
    """
    chosen: set[Node] = set()
    found = [node for node in placed.nodes if _is_update(node)]
    while found:
        node = found.pop()
        if node in chosen or node.is_folded or not _is_of_update(node, placed):
            continue
        chosen.add(node)
        found += [value.node for value in node.inputs if _is_by_elements(value)]
    return chosen


def _is_update(node: Node) -> bool:
    return is_assignment(node) and _is_large(node.inputs[1])


def _is_of_update(node: Node, placed: Placed) -> bool:
    plan = placed.plans[node]
    values = [*node.inputs, *node.outputs]
    return all(
        is_whole(placement)
        or isinstance(placement, HandleOf)
        or placement == placed.shards.get(value.shape or ())
        for value, placement in zip(values, [*plan.want, *plan.outputs], strict=True)
    )


def _is_by_elements(value: Value) -> bool:
    node = value.node
    is_read = node.type == "ReadVariableOp"
    return (is_read or node.type in _ARITHMETIC) and _is_large(value)


def _is_large(value: Value) -> bool:
    return value.dtype in _DTYPES and value.nbytes >= LEAST_BYTES
