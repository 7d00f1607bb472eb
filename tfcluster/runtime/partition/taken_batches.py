"""Batches that a loop takes one after the other, whose size is known only when it runs.

The body of such a loop (``steps_per_execution``, or ``next(batches)`` in a loop over
``tf.range``) is split where it takes a batch. The rest becomes two branches: one for
batches of the size that was seen first, which can be divided, and one for others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from tfcluster.runtime.partition.functions import Function, Input, SourceNode
from tfcluster.runtime.partition.graph import Value
from tfcluster.runtime.partition.shape_graph import Path, ShapeGraph
from tfcluster.runtime.partition.tf_functions import HostFunction
from tfcluster.runtime.tensor_types import DType, Message

TAKES = ("IteratorGetNext", "IteratorGetNextSync", "OptionalGetValue")


@dataclass(frozen=True, slots=True)
class Taken:
    """What is known of batches that loops take: see ``taken_batches``."""

    rows: int | None
    """The size of the batches that are to be divided; None if it is not known yet."""
    least: int
    """The fewest rows that can be divided."""
    note: HostFunction
    """Called with the size of each other batch."""


@dataclass(frozen=True, slots=True)
class SplitFunction:
    """A function in two parts, of which the first takes a batch."""

    first: Function
    """It has the outputs that ``rest`` needs in addition to the arguments."""
    rest: Function
    """Its arguments are those of the whole function, then the outputs of ``first``."""


def split(function: Function) -> SplitFunction | None:
    """Split a function where it takes its first batch; None if it takes none."""
    taking = next(
        (n for n, each in function.nodes.items() if each.definition.op in TAKES), None
    )
    if taking is None:
        return None
    before = _ancestors(function.nodes, taking)
    after = {n: each for n, each in function.nodes.items() if n not in before}
    needed = [
        each
        for source in after.values()
        for each in source.inputs
        if each.node in before
    ]
    needed += [each for each in function.outputs if each.node in before]
    crossing = {each: f"taken_{i}" for i, each in enumerate(dict.fromkeys(needed))}

    def renamed(inputs: Sequence[Input]) -> tuple[Input, ...]:
        return tuple(
            Input(crossing[each], 0) if each in crossing else each for each in inputs
        )

    rest = {
        name: replace(
            each,
            inputs=renamed(each.inputs),
            controls=tuple(c for c in each.controls if c not in before),
        )
        for name, each in after.items()
    }
    return SplitFunction(
        replace(
            function,
            nodes={n: each for n, each in function.nodes.items() if n in before},
            outputs=tuple(crossing),
            must_run=tuple(n for n in function.must_run if n in before) or (taking,),
        ),
        replace(
            function,
            arguments=(*function.arguments, *crossing.values()),
            nodes=rest,
            outputs=renamed(function.outputs),
            must_run=tuple(n for n in function.must_run if n not in before),
        ),
    )


def _ancestors(nodes: Mapping[str, SourceNode], name: str) -> set[str]:
    found, todo = {name}, [name]
    while todo:
        source = nodes[todo.pop()]
        for each in (*(i.node for i in source.inputs), *source.controls):
            if each in nodes and each not in found:
                found.add(each)
                todo.append(each)
    return found


def first_size(graph: ShapeGraph, value: Value) -> Value:
    """The first size of a value, int32 of shape ()."""
    shape = _simple(graph, "Shape", [value], tf.int32, T=value.dtype, out_type=tf.int32)
    zero = graph.constant(np.array(0, np.int32), tf.int32)
    return _simple(
        graph,
        "GatherV2",
        [shape, zero, zero],
        tf.int32,
        Tparams=tf.int32,
        Tindices=tf.int32,
        Taxis=tf.int32,
    )


def all_are(graph: ShapeGraph, sizes: Sequence[Value], rows: int) -> Value:
    """Whether all sizes are ``rows``: bool of shape ()."""
    number = graph.constant(np.array(rows, np.int32), tf.int32)
    first, *others = (
        _simple(graph, "Equal", [size, number], tf.bool, T=tf.int32) for size in sizes
    )
    for each in others:
        first = _simple(graph, "LogicalAnd", [first, each], tf.bool)
    return first


def note(graph: ShapeGraph, taken: Taken, size: Value, path: Path) -> None:
    """Tell the host the size of a batch."""
    token = tf.compat.v1.AttrValue(s=taken.note.token.encode())
    attributes = {"token": token, "Tin": types_of([tf.int32]), "Tout": types_of([])}
    graph.add("PyFunc", [size], [], attributes, [], "note", stateful=True, origin=path)


def _simple(
    graph: ShapeGraph,
    op_type: str,
    inputs: Sequence[Value],
    dtype: DType,
    **types: DType,
) -> Value:
    attributes = {name: types_of([each], single=True) for name, each in types.items()}
    return graph.add(op_type, inputs, [], attributes, [dtype], "batch_size").outputs[0]


def types_of(dtypes: Sequence[DType], *, single: bool = False) -> Message:
    """An attribute for dtypes: a list, or a ``single`` one."""
    found = tf.compat.v1.AttrValue()
    if single:
        found.type = dtypes[0].as_datatype_enum
        return found
    found.list.SetInParent()
    found.list.type.extend(each.as_datatype_enum for each in dtypes)
    return found


def of_fixed_size(batch: Sequence[Value], least: int) -> dict[Value, int]:
    """The values of a batch that have its rows, if the batch has a fixed size."""
    data = [
        value
        for value in batch
        if not value.is_handle and value.dtype != tf.string and value.elements
    ]
    sizes: dict[int, int] = {}
    for value in data:
        rows = (value.shape or (None,))[0]
        if rows is not None and rows >= max(least, 2):
            sizes[rows] = sizes.get(rows, 0) + value.nbytes
    if not sizes:
        return {}
    rows = max(sizes, key=lambda size: sizes[size])
    return {value: rows for value in data if value.shape and value.shape[0] == rows}


def has_unknown_rows(value: Value) -> bool:
    """Whether nothing but the number of rows is unknown of a batch's shape."""
    if value.is_handle or value.dtype == tf.string or not value.shape:
        return False
    return value.shape[0] is None and None not in value.shape[1:]
