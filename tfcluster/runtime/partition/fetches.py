"""The batches that a function takes from iterators before it does anything else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfcluster.runtime.partition.functions import (
    Function,
    called_function,
    function_named,
)
from tfcluster.runtime.partition.graph import python_value
from tfcluster.runtime.partition.specialise import Path
from tfcluster.runtime.tensor_types import DType, Shape, Tensor


@dataclass(frozen=True, slots=True)
class Fetch:
    """A node that takes the next element of an iterator, which is an input."""

    path: Path
    """The names of the calls around the node, and its own."""
    iterator: int
    """The number of the function's input."""
    types: Sequence[DType]
    shapes: Sequence[Shape]

    def next(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Take the element. Raises OutOfRangeError if there is none."""
        found = tf.raw_ops.IteratorGetNext(
            iterator=inputs[self.iterator],
            output_types=self.types,
            output_shapes=self.shapes,
        )
        return list(found)


def fetches_of(function: Function) -> list[Fetch]:
    """The fetches that every call of the function makes once, in order."""
    places = {name: index for index, name in enumerate(function.arguments)}
    return list(_fetches(function, places, ()))


def _fetches(function: Function, places: dict[str, int], path: Path) -> Iterator[Fetch]:
    for name, node in function.nodes.items():
        known = [places.get(each.node) for each in node.inputs]
        if node.definition.op == "IteratorGetNext":
            if known[0] is not None:
                attributes = node.definition.attr
                yield Fetch(
                    (*path, name),
                    known[0],
                    python_value(attributes["output_types"]),
                    python_value(attributes["output_shapes"]),
                )
            continue
        called = called_function(node.definition)
        if called is None or all(each is None for each in known):
            continue
        inner = function_named(called)
        if inner is not None:
            pairs = zip(inner.arguments, known, strict=True)
            passed = {each: place for each, place in pairs if place is not None}
            yield from _fetches(inner, passed, (*path, name))
