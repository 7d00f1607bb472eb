"""Reads of divided variables: lookups without a copy, and what needs all rows.

Keras reads a whole variable and gathers rows of it. TensorFlow copies a variable that
is read if others change some of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from tfcluster.runtime.partition.functions import LOOPS
from tfcluster.runtime.partition.graph import Node, OpGraph, Value
from tfcluster.runtime.partition.placed import Placed
from tfcluster.runtime.partition.placement import REPLICATE, Placement, Shard


def gather_from_handles(graph: OpGraph, tables: Iterable[Value]) -> None:
    """Let lookups in these variables gather rows from the handles.

    ``tables`` are handles among the inputs of the graph.
    """
    handles = {*tables}
    after: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        for earlier in node.controls:
            after.setdefault(earlier, []).append(node)
    for node in graph.nodes:
        carried = node.inputs if node.type in LOOPS else node.inputs[1:]
        for body in node.bodies:
            pairs = zip(body.inputs, carried, strict=True)
            gather_from_handles(body, [own for own, value in pairs if value in handles])
        if _is_lookup(node, handles):
            _gather_from_handle(node, after)
    _drop_reads(graph, handles, after)


def _drop_reads(
    graph: OpGraph, handles: set[Value], after: dict[Node, list[Node]]
) -> None:
    """Let nothing wait for reads of which nobody needs the value."""
    used = {
        value for node in graph.nodes if not node.is_folded for value in node.inputs
    }
    used.update(graph.outputs)
    for read in graph.nodes:
        if read.type != "ReadVariableOp" or read.inputs[0] not in handles:
            continue
        if read.outputs[0] not in used:
            for waiting in after.get(read, ()):
                waiting.controls.remove(read)
                waiting.controls += read.controls


def _is_lookup(node: Node, handles: set[Value]) -> bool:
    if node.type != "GatherV2" or node.attribute("batch_dims"):
        return False
    read, axis = node.inputs[0].node, node.inputs[2].constant
    is_read = read.type == "ReadVariableOp" and read.inputs[0] in handles
    return is_read and axis is not None and int(axis) == 0


def _gather_from_handle(node: Node, after: dict[Node, list[Node]]) -> None:
    """Turn a lookup into one that takes the place of the read in the order of ops.

    Not if the indices depend on what must run after the read.
    """
    read, indices = node.inputs[0].node, node.inputs[1]
    later = after.get(read, [])
    if not _ancestors(indices.node).isdisjoint(later) or node in later:
        return
    dtype, index_dtype = node.outputs[0].dtype, indices.dtype
    node.type, node.stateful = "ResourceGather", True
    node.inputs = [read.inputs[0], indices]
    node.controls = list(dict.fromkeys([*node.controls, *read.controls]))
    node.attributes = {
        "dtype": tf.compat.v1.AttrValue(type=dtype.as_datatype_enum),
        "Tindices": tf.compat.v1.AttrValue(type=index_dtype.as_datatype_enum),
        "batch_dims": tf.compat.v1.AttrValue(i=0),
    }
    for waiting in later:
        waiting.controls.append(node)
    after.setdefault(node, []).extend(later)


def made_whole(placed: Placed) -> list[Node]:
    """The ops for which ranks make all rows of a divided variable, or as many."""
    rows = placed.table_rows
    nodes = [
        node
        for node, plan in placed.plans.items()
        for value, want in zip(node.inputs, plan.want, strict=not node.is_folded)
        if want == REPLICATE and _is_table(value, placed.placements[value], rows)
    ]
    bodies = (body for bodies in placed.bodies.values() for body in bodies)
    return [*nodes, *(node for body in bodies for node in made_whole(body))]


def _is_table(value: Value, placement: Placement, rows: frozenset[int]) -> bool:
    is_divided = isinstance(placement, Shard) and placement.rows in rows
    return is_divided and len(value.shape or ()) > 1


def _ancestors(node: Node) -> set[Node]:
    """The node, and all that must run before it."""
    ancestors, waiting = {node}, [node]
    while waiting:
        current = waiting.pop()
        needed = {*current.controls, *(value.node for value in current.inputs)}
        waiting += needed - ancestors
        ancestors |= needed
    return ancestors
