"""A ``tf.data`` pipeline as a graph: what it contains, and its seeds for one pass.

The data tasks restart the dataset from its graph for each pass. A shuffle would then
repeat the same order, whereas in one process it continues its random sequence. So the
shuffle gets the seeds that it would have drawn by then. This follows the seed generator
of ``ShuffleDatasetOp`` in TensorFlow.
"""

from __future__ import annotations

import tensorflow as tf

from tfcluster.runtime import tf_internals
from tfcluster.runtime.parameter_server.update_graph import nodes_of
from tfcluster.runtime.tensor_types import Dataset, ProtocolBuffer

_PYTHON = ("EagerPyFunc", "PyFunc", "PyFuncStateless", "GeneratorDataset")
_STATE = ("MutableDenseHashTableV2", "MutableHashTableV2", "VarHandleOp")
"""Ops with state in this process; the data tasks would keep using its old value."""

_SHUFFLE = "ShuffleDatasetV3"
_SEED, _SEED2, _GENERATOR = 2, 3, 4
"""Positions among a shuffle's inputs."""

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
"""Datasets that several tasks can compute in parts: together these contain the same
elements in a different order. ``take`` and ``skip`` are excluded: each task would take
or skip that many."""

_REMAINDER = {
    "BatchDatasetV2": 2,
    "PaddedBatchDatasetV2": -1,
    "ParallelBatchDataset": 3,
}
"""The position of ``drop_remainder`` among the inputs."""


class Pipeline:
    """The graph of a dataset. Raises tf.errors.OpError if the dataset has none."""

    def __init__(self, dataset: Dataset) -> None:
        self.spec = dataset.element_spec
        self.cardinality = int(dataset.cardinality())
        self._text: bytes = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf_internals.variant_of(dataset),
            external_state_policy=1,  # ignore; for_pass sets the seeds
            strip_device_assignment=True,
        ).numpy()

    def why_local(self, tasks: int) -> str | None:
        """Why ``tasks`` data tasks cannot compute the dataset; None if they can."""
        graph = self._graph()
        for node in nodes_of(graph):
            if node.op in _PYTHON:
                return "it calls Python (a generator, or py_function)"
        for node in graph.node:
            if node.op in _STATE:
                return "it uses a variable of this process"
        return None if tasks == 1 else _why_undivided(graph)

    def for_pass(self, number: int, name: str) -> Dataset:
        """The dataset as it is in pass ``number``, counted from 0.

        ``name`` must be unique to this pass.
        """
        graph = self._graph()
        by_name = {node.name: node for node in graph.node}
        # A shuffle inside a repeat continues its sequence with other seeds.
        repeats = any(node.op.startswith("Repeat") for node in graph.node)
        for index, node in enumerate(filter(_reshuffles, graph.node)):
            inputs = [by_name[name_of_input] for name_of_input in node.input]
            handle = inputs[_GENERATOR].attr["value"].tensor.resource_handle_val[0]
            handle.name = f"{name}/{index}"
            if not number and repeats:
                continue
            drawn = _drawn(_value(inputs[_SEED]), _value(inputs[_SEED2]), number)
            for place, seed in zip((_SEED, _SEED2), drawn, strict=True):
                # Nodes may share a constant, so give this one its own.
                seed_node = graph.node.add()
                seed_node.CopyFrom(inputs[place])
                seed_node.name = f"{node.name}/seed{place}"
                seed_node.attr["value"].tensor.CopyFrom(
                    tf.make_tensor_proto(seed, tf.int64)
                )
                node.input[place] = seed_node.name
            node.attr["reshuffle_each_iteration"].b = repeats
        if number:
            _draw_otherwise(graph, number)
        variant = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
        return tf.data.experimental.from_variant(variant, self.spec)

    def _graph(self) -> ProtocolBuffer:
        return tf.compat.v1.GraphDef.FromString(self._text)


def _reshuffles(node: ProtocolBuffer) -> bool:
    # Reading a missing attribute would create it.
    return node.op == _SHUFFLE and bool(node.attr["reshuffle_each_iteration"].b)


def _draws(node: ProtocolBuffer) -> bool:
    """Whether this is a random op with its own seed or a global seed."""
    if "seed" not in node.attr or "seed2" not in node.attr or "Dataset" in node.op:
        return False
    return bool(node.attr["seed"].i or node.attr["seed2"].i)


def _draw_otherwise(graph: ProtocolBuffer, number: int) -> None:
    for node in filter(_draws, list(nodes_of(graph))):
        node.attr["seed2"].i += number


def _value(node: ProtocolBuffer) -> int:
    return int(tf.make_ndarray(node.attr["value"].tensor).item())


def _drawn(seed: int, seed2: int, number: int) -> tuple[int, int]:
    """The seeds that a shuffle's generator draws for pass ``number``."""
    variant = tf.raw_ops.RandomDataset(
        seed=seed, seed2=seed2, output_types=[tf.int64], output_shapes=[[]]
    )
    spec = tf.TensorSpec([], tf.int64)
    drawn = tf.data.experimental.from_variant(variant, spec)
    first, second = drawn.skip(2 * number).take(2).as_numpy_iterator()
    return int(first), int(second)


def _why_undivided(graph: ProtocolBuffer) -> str | None:
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
