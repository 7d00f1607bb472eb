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
from tfcluster.runtime.partition.shape_graph import Path
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
    """The fetches that every call of the function makes once, in order.

    Without those of iterators that the function also uses otherwise, as in a loop:
    these would get the wrong elements.
    """
    places = {name: index for index, name in enumerate(function.arguments)}
    others: set[int] = set()
    found = list(_fetches(function, places, (), others))
    return [fetch for fetch in found if fetch.iterator not in others]


def _fetches(
    function: Function, places: dict[str, int], path: Path, others: set[int]
) -> Iterator[Fetch]:
    """Adds to ``others`` the inputs that are used in another way."""
    for name, node in function.nodes.items():
        known = [places.get(each.node) for each in node.inputs]
        if all(place is None for place in known):
            continue
        if node.definition.op == "IteratorGetNext" and known[0] is not None:
            attributes = node.definition.attr
            yield Fetch(
                (*path, name),
                known[0],
                python_value(attributes["output_types"]),
                python_value(attributes["output_shapes"]),
            )
            continue
        called = called_function(node.definition)
        inner = None if called is None else function_named(called)
        if inner is None:
            others.update(place for place in known if place is not None)
            continue
        pairs = zip(inner.arguments, known, strict=True)
        passed = {each: place for each, place in pairs if place is not None}
        yield from _fetches(inner, passed, (*path, name), others)


def handed(
    fetches: Sequence[Fetch], taken: Sequence[Tensor], inputs: Sequence[Tensor]
) -> list[Tensor]:
    """Inputs with which the function itself gets elements that were taken already.

    ``taken`` has those of the first ``fetches``, or of all. Iterators of which
    something was taken are replaced by others, which have only that.
    """
    datasets: dict[int, tuple[Fetch, Tensor]] = {}
    rest = list(taken)
    for fetch in fetches:
        if not rest:
            break
        element, rest = rest[: len(fetch.types)], rest[len(fetch.types) :]
        kinds = {"output_types": fetch.types, "output_shapes": fetch.shapes}
        dataset = tf.raw_ops.TensorDataset(
            components=element, output_shapes=[each.shape for each in element]
        )
        if fetch.iterator in datasets:
            _, before = datasets[fetch.iterator]
            dataset = tf.raw_ops.ConcatenateDataset(
                input_dataset=before, another_dataset=dataset, **kinds
            )
        datasets[fetch.iterator] = fetch, dataset
    found = list(inputs)
    for place, (fetch, dataset) in datasets.items():
        found[place] = tf.raw_ops.AnonymousIteratorV3(
            output_types=fetch.types, output_shapes=fetch.shapes
        )
        tf.raw_ops.MakeIterator(dataset=dataset, iterator=found[place])
    return found
