"""Batches that a function takes from iterators, at its start or in a loop.

Those of a loop are taken one after the other, and their size is known only when it
runs. The body of such a loop (``steps_per_execution``, or ``next(batches)`` in a loop
over ``tf.range``) is split where it takes a batch. The rest becomes two branches: one
for batches of the size that was seen first, which can be divided, and one for others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from tfcluster.runtime.partition.functions import (
    Function,
    Input,
    SourceNode,
    called_function,
    function_named,
    op_types,
)
from tfcluster.runtime.partition.graph import Value, python_value
from tfcluster.runtime.partition.shape_graph import Path, ShapeGraph
from tfcluster.runtime.partition.tf_functions import HostFunction
from tfcluster.runtime.tensor_types import DType, ProtocolBuffer, Shape, Tensor


@dataclass(frozen=True, slots=True)
class TakenElement:
    """A node that takes the next element of an iterator, which is an input."""

    path: Path
    """The names of the calls around the node, and its own."""
    iterator: int
    """The number of the function's input."""
    types: Sequence[DType]
    shapes: Sequence[Shape]

    def next(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Take the element. Raises OutOfRangeError if there is none."""
        components = tf.raw_ops.IteratorGetNext(
            iterator=inputs[self.iterator],
            output_types=self.types,
            output_shapes=self.shapes,
        )
        return list(components)


def fetches_of(function: Function) -> list[TakenElement]:
    """The fetches that every call of the function makes once, in order.

    Without those of iterators that the function also uses otherwise, as in a loop:
    these would get the wrong elements.
    """
    places = {name: index for index, name in enumerate(function.arguments)}
    others: set[int] = set()
    fetches = list(_fetches(function, places, (), others))
    return [fetch for fetch in fetches if fetch.iterator not in others]


def _fetches(
    function: Function, places: dict[str, int], path: Path, others: set[int]
) -> Iterator[TakenElement]:
    """Adds to ``others`` the inputs that are used in another way."""
    for name, node in function.nodes.items():
        iterators = [places.get(source.node) for source in node.inputs]
        if all(place is None for place in iterators):
            continue
        if node.definition.op == "IteratorGetNext" and iterators[0] is not None:
            attributes = node.definition.attr
            yield TakenElement(
                (*path, name),
                iterators[0],
                python_value(attributes["output_types"]),
                python_value(attributes["output_shapes"]),
            )
            continue
        called = called_function(node.definition)
        inner = None if called is None else function_named(called)
        if inner is None:
            others.update(place for place in iterators if place is not None)
            continue
        pairs = zip(inner.arguments, iterators, strict=True)
        passed = {argument: place for argument, place in pairs if place is not None}
        yield from _fetches(inner, passed, (*path, name), others)


def handed(
    fetches: Sequence[TakenElement], taken: Sequence[Tensor], inputs: Sequence[Tensor]
) -> list[Tensor]:
    """Inputs with which the function itself gets elements that were taken already.

    ``taken`` has those of the first ``fetches``, or of all. Iterators of which
    something was taken are replaced by others, which have only that.
    """
    datasets: dict[int, tuple[TakenElement, Tensor]] = {}
    rest = list(taken)
    for fetch in fetches:
        if not rest:
            break
        element, rest = rest[: len(fetch.types)], rest[len(fetch.types) :]
        kinds = {"output_types": fetch.types, "output_shapes": fetch.shapes}
        dataset = tf.raw_ops.TensorDataset(
            components=element, output_shapes=[component.shape for component in element]
        )
        if fetch.iterator in datasets:
            _, before = datasets[fetch.iterator]
            dataset = tf.raw_ops.ConcatenateDataset(
                input_dataset=before, another_dataset=dataset, **kinds
            )
        datasets[fetch.iterator] = fetch, dataset
    replaced = list(inputs)
    for place, (fetch, dataset) in datasets.items():
        replaced[place] = tf.raw_ops.AnonymousIteratorV3(
            output_types=fetch.types, output_shapes=fetch.shapes
        )
        tf.raw_ops.MakeIterator(dataset=dataset, iterator=replaced[place])
    return replaced


_TAKES = frozenset(("IteratorGetNext", "IteratorGetNextSync"))
_OF_OPTIONALS = _TAKES | {"OptionalGetValue"}
_MAKES_OPTIONALS = frozenset(("IteratorGetNextAsOptional", "ReduceDataset"))


def takes_of(function: Function) -> frozenset[str]:
    """The types of the ops that take batches in a function.

    Where no iterator yields optionals, those are what a branch keeps for its gradient.
    """
    makes = not _MAKES_OPTIONALS.isdisjoint(op_types(function))
    return _OF_OPTIONALS if makes else _TAKES


@dataclass(frozen=True, slots=True)
class Taken:
    """What is known of batches that loops take: see ``taken_batches``."""

    rows: int | None
    """The size of the batches that are to be divided; None if it is not known yet."""
    least: int
    """The fewest rows that can be divided."""
    note: HostFunction
    """Called with the size of each other batch."""
    takes: frozenset[str]
    """See ``takes_of``."""


@dataclass(frozen=True, slots=True)
class SplitFunction:
    """A function in two parts, of which the first takes a batch."""

    first: Function
    """It has the outputs that ``rest`` needs in addition to the arguments."""
    rest: Function
    """Its arguments are those of the whole function, then the outputs of ``first``."""


def split(function: Function, takes: frozenset[str]) -> SplitFunction | None:
    """Split a function where it takes its first batch; None if it takes none.

    For ``takes``, see ``takes_of``.
    """
    taking = next(
        (n for n, node in function.nodes.items() if node.definition.op in takes), None
    )
    if taking is None:
        return None
    before = _ancestors(function.nodes, taking)
    after = {n: node for n, node in function.nodes.items() if n not in before}
    needed = [
        tensor
        for source in after.values()
        for tensor in source.inputs
        if tensor.node in before
    ]
    needed += [output for output in function.outputs if output.node in before]
    crossing = {tensor: f"taken_{i}" for i, tensor in enumerate(dict.fromkeys(needed))}

    def renamed(inputs: Sequence[Input]) -> tuple[Input, ...]:
        return tuple(
            Input(crossing[tensor], 0) if tensor in crossing else tensor
            for tensor in inputs
        )

    rest = {
        name: replace(
            node,
            inputs=renamed(node.inputs),
            controls=tuple(c for c in node.controls if c not in before),
        )
        for name, node in after.items()
    }
    return SplitFunction(
        replace(
            function,
            nodes={n: node for n, node in function.nodes.items() if n in before},
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
    ancestors, todo = {name}, [name]
    while todo:
        source = nodes[todo.pop()]
        for source_name in (*(i.node for i in source.inputs), *source.controls):
            if source_name in nodes and source_name not in ancestors:
                ancestors.add(source_name)
                todo.append(source_name)
    return ancestors


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
    for is_equal in others:
        first = _simple(graph, "LogicalAnd", [first, is_equal], tf.bool)
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
    attributes = {name: types_of([dtype], single=True) for name, dtype in types.items()}
    return graph.add(op_type, inputs, [], attributes, [dtype], "batch_size").outputs[0]


def types_of(dtypes: Sequence[DType], *, single: bool = False) -> ProtocolBuffer:
    """An attribute for dtypes: a list, or a ``single`` one."""
    attribute = tf.compat.v1.AttrValue()
    if single:
        attribute.type = dtypes[0].as_datatype_enum
        return attribute
    attribute.list.SetInParent()
    attribute.list.type.extend(dtype.as_datatype_enum for dtype in dtypes)
    return attribute


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
