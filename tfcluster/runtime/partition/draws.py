"""The states of random ops that keep one in their kernel on one machine.

An op's kernel is a counter of Philox, which begins with the op's seeds and advances by
the count of numbers drawn (``GuardedPhiloxRandom`` in TensorFlow). The programs of a
function share the counter here, so that they continue one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.graph import Node, elements_of
from tfcluster.runtime.partition.rules.random import STATEFUL
from tfcluster.runtime.partition.writer import Ref, Writer
from tfcluster.runtime.tensor_types import Array

_PHILOX = 1
_STATE = tf.TensorShape([3])


class Draws:
    """The states of the random ops of one function.

    ``new_seed`` returns seeds for ops that have none; all ranks must get the same.
    """

    def __init__(self, new_seed: Callable[[], int]) -> None:
        self._new_seed = new_seed
        self._prefix = tf_functions.unique_name("tfcluster_draws")
        self._names: dict[tuple[str, ...], str] = {}

    def write(self, writer: Writer, node: Node, inputs: Sequence[Ref]) -> list[Ref]:
        """Write the op as a stateless one that gets the counter, and advance that."""
        shape = inputs[0]
        handle = writer.node(
            "VarHandleOp",
            [],
            {
                "shared_name": self._state_of(node),
                "container": "",
                "dtype": tf.int64,
                "shape": _STATE,
            },
            "state",
        )[0]
        algorithm = writer.constant(np.array(_PHILOX, np.int32))
        count = self._count(writer, node, shape)
        state = writer.op("RngReadAndSkip", [handle, algorithm, count], {})[0]
        last = writer.last
        bits = writer.op("Bitcast", [state], {"type": tf.uint64})[0]
        counter, key = (
            self._part(writer, bits, begin, size) for begin, size in ((0, 2), (2, 1))
        )
        given = [shape, key, counter, algorithm, *inputs[1:]]
        attributes = {} if node.type == "RandomUniformInt" else _dtype(node)
        found = writer.op(STATEFUL[node.type], given, attributes, node.name)
        writer.last = last
        return found

    def _count(self, writer: Writer, node: Node, shape: Ref) -> Ref:
        elements = elements_of(node.outputs[0].shape)
        if elements is not None:
            return writer.constant(np.array(elements, np.uint64))
        axes = writer.constant(np.array([0], np.int32))
        product = writer.op("Prod", [shape, axes], {"keep_dims": False})
        return writer.op("Cast", product, {"DstT": tf.uint64})[0]

    def _part(self, writer: Writer, bits: Ref, begin: int, size: int) -> Ref:
        bounds = [writer.constant(np.array([n], np.int32)) for n in (begin, size)]
        return writer.op("Slice", [bits, *bounds], {})[0]

    def _state_of(self, node: Node) -> str:
        """The name of the node's state, which exists from then on."""
        name = self._names.get(node.origin)
        if name is None:
            name = self._names[node.origin] = f"{self._prefix}_{len(self._names)}"
            seeds = node.attribute("seed") or 0, node.attribute("seed2") or 0
            if seeds == (0, 0):
                seeds = self._new_seed(), self._new_seed()
            seed, seed2 = (np.array(s % (1 << 64), np.uint64) for s in seeds)
            _create(name, np.array([0, seed2, seed], np.uint64).view(np.int64))
        return name


def _dtype(node: Node) -> dict[str, object]:
    return {"dtype": node.attribute("dtype")}


def _create(name: str, value: Array) -> None:
    handle = tf.raw_ops.VarHandleOp(
        shared_name=name, container="", dtype=tf.int64, shape=_STATE
    )
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(value))
