"""A ``tf.data`` pipeline as a graph: what is in it, and its seeds for a certain pass.

The data tasks begin each pass over a dataset anew, from its graph. A shuffle would
then come to the same order every time, where in one process it goes on drawing: so it
gets the seeds that it would have drawn by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfcluster.runtime import tf_internals

_PYTHON = ("EagerPyFunc", "PyFunc", "PyFuncStateless", "GeneratorDataset")
_STATE = ("MutableDenseHashTableV2", "MutableHashTableV2", "VarHandleOp")
"""They may change while the data tasks go on with what they were."""

_SHUFFLE = "ShuffleDatasetV3"
_SEED, _SEED2, _GENERATOR = 2, 3, 4
"""Places among a shuffle's inputs."""

_DIVISIBLE = (
    "AssertNext",
    "Batch",
    "Cache",
    "Concatenate",
    "Filter",
    "FlatMap",
    "IgnoreErrors",
    "Interleave",
    "Map",
    "MapAndBatch",
    "Model",
    "Options",
    "PaddedBatch",
    "ParallelBatch",
    "ParallelInterleave",
    "ParallelMap",
    "Prefetch",
    "Range",
    "Repeat",
    "Shuffle",
    "TensorSlice",
    "Unbatch",
)
"""Of these, the parts that several tasks make are the whole, in another order. Not of
``take`` or ``skip``: each task would take as many."""

_REMAINDER = {
    "BatchDatasetV2": 2,
    "PaddedBatchDatasetV2": -1,
    "ParallelBatchDataset": 3,
}
"""Where among the inputs it stands whether a last, smaller batch is dropped."""


class Pipeline:
    """The graph of a dataset. Raises tf.errors.OpError where it has none."""

    def __init__(self, dataset: Any) -> None:
        self.spec = dataset.element_spec
        self.cardinality = int(dataset.cardinality())
        self._text: bytes = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf_internals.variant_of(dataset),
            external_state_policy=1,  # to ignore it: seeds are seen to below
            strip_device_assignment=True,
        ).numpy()

    def why_here(self, tasks: int) -> str | None:
        """Why ``tasks`` data tasks cannot compute it; None where they can."""
        graph = self._graph()
        for node in _nodes(graph):
            if node.op in _PYTHON:
                return "it calls Python (a generator, or py_function)"
        for node in graph.node:
            if node.op in _STATE:
                return "it uses a variable of this process"
        return None if tasks == 1 else _why_undivided(graph)

    def for_pass(self, number: int, name: str) -> Any:
        """The dataset as it is in pass ``number`` (from 0 on) over it.

        ``name`` belongs to this pass alone.
        """
        graph = self._graph()
        by_name = {node.name: node for node in graph.node}
        # A shuffle within a repetition goes on drawing, with other seeds.
        repeats = any(node.op.startswith("Repeat") for node in graph.node)
        for index, node in enumerate(filter(_reshuffles, graph.node)):
            inputs = [by_name[each] for each in node.input]
            handle = inputs[_GENERATOR].attr["value"].tensor.resource_handle_val[0]
            handle.name = f"{name}/{index}"
            if not number and repeats:
                continue
            drawn = _drawn(_value(inputs[_SEED]), _value(inputs[_SEED2]), number)
            for place, seed in zip((_SEED, _SEED2), drawn, strict=True):
                # Nodes may share a constant.
                fresh = graph.node.add()
                fresh.CopyFrom(inputs[place])
                fresh.name = f"{node.name}/seed{place}"
                fresh.attr["value"].tensor.CopyFrom(
                    tf.make_tensor_proto(seed, tf.int64)
                )
                node.input[place] = fresh.name
            node.attr["reshuffle_each_iteration"].b = repeats
        if number:
            _draw_otherwise(graph, number)
        variant = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
        return tf.data.experimental.from_variant(variant, self.spec)

    def _graph(self) -> Any:
        return tf.compat.v1.GraphDef.FromString(self._text)


def _nodes(graph: Any) -> Iterator[Any]:
    """Also those of the functions that a pipeline calls."""
    yield from graph.node
    for function in graph.library.function:
        yield from function.node_def


def _reshuffles(node: Any) -> bool:
    # To ask an attribute that is not there is to make one.
    return node.op == _SHUFFLE and bool(node.attr["reshuffle_each_iteration"].b)


def _draws(node: Any) -> bool:
    """A random op that has been given a seed, of the program's or a common one."""
    if "seed" not in node.attr or "seed2" not in node.attr or "Dataset" in node.op:
        return False
    return bool(node.attr["seed"].i or node.attr["seed2"].i)


def _draw_otherwise(graph: Any, number: int) -> None:
    for node in filter(_draws, list(_nodes(graph))):
        node.attr["seed2"].i += number


def _value(node: Any) -> int:
    return int(tf.make_ndarray(node.attr["value"].tensor).item())


def _drawn(seed: int, seed2: int, number: int) -> tuple[int, int]:
    """The seeds that a shuffle's generator gives to pass ``number``."""
    variant = tf.raw_ops.RandomDataset(
        seed=seed, seed2=seed2, output_types=[tf.int64], output_shapes=[[]]
    )
    spec = tf.TensorSpec([], tf.int64)
    drawn = tf.data.experimental.from_variant(variant, spec)
    first, second = drawn.skip(2 * number).take(2).as_numpy_iterator()
    return int(first), int(second)


def _why_undivided(graph: Any) -> str | None:
    by_name = {node.name: node for node in graph.node}
    sources = 0
    for node in graph.node:
        if "Dataset" not in node.op:
            continue
        kind = node.op.partition("Dataset")[0]
        sources += kind in ("Range", "TensorSlice")
        place = _REMAINDER.get(node.op)
        if kind not in _DIVISIBLE:
            return f"several data tasks cannot share {kind.lower()}(...)"
        if place is not None and _value(by_name[node.input[place]]):
            return "each data task would drop a remainder (drop_remainder=True)"
    return None if sources else "several data tasks cannot share its source"
