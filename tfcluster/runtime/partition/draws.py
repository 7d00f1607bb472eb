"""The states of random ops that keep one in their kernel on one machine.

The programs of a function share the states here, so that they continue one sequence.
For most ops the kernel is a counter of Philox, which begins with the op's seeds and
advances by the count of numbers drawn (``GuardedPhiloxRandom`` in TensorFlow): here it
is a variable, whose value a stateless op gets. There is no such stateless op for the
others (``OWN_STATE``): each runs on the host, in a session of its own, whose kernel
lives on between the programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.graph import Node, elements_of
from tfcluster.runtime.partition.rules.random import STATEFUL
from tfcluster.runtime.partition.tf_functions import HostFunction
from tfcluster.runtime.partition.writer import OpWriter, Ref
from tfcluster.runtime.tensor_types import Array

_PHILOX = 1
_STATE = tf.TensorShape([3])
_LARGEST = np.iinfo(np.int64)

Origin: TypeAlias = tuple[str, ...]
Seeds: TypeAlias = tuple[int, int]


class Draws:
    """The states of the random ops of one function.

    ``new_seed`` returns seeds for ops that have none; all ranks must get the same.
    """

    def __init__(self, new_seed: Callable[[], int]) -> None:
        self._new_seed = new_seed
        self._prefix = tf_functions.unique_name("tfcluster_draws")
        self._counters: dict[Origin, str] = {}
        self._hosts: dict[Origin, HostFunction] = {}
        self._first_states: dict[str, Array] = {}
        """Of the counters whose ops have seeds, by name."""
        self._seeded: list[_KeptKernel] = []
        """The ops on the host that have seeds."""
        self._canary: _Canary | None = None

    def begin(self) -> None:
        """Let sequences begin anew where kernels do; call it before each program.

        ``tf.random.set_seed`` and ``keras.backend.clear_session`` clear kernels.
        """
        if self._canary is not None and self._canary.is_new():
            for name, value in self._first_states.items():
                _assign(name, value)
            for kernel in self._seeded:
                kernel.restart()

    def write(self, writer: OpWriter, node: Node, inputs: Sequence[Ref]) -> list[Ref]:
        """Write the op so that it continues its sequence; all inputs are whole."""
        if node.type in STATEFUL:
            return self._from_counter(writer, node, inputs)
        return self._from_host(writer, node, inputs)

    # --- counters ---------------------------------------------------------------------

    def _from_counter(
        self, writer: OpWriter, node: Node, inputs: Sequence[Ref]
    ) -> list[Ref]:
        """A stateless op that gets the counter, which is advanced."""
        shape = _whole_shape(writer, node, inputs)
        handle = writer.node(
            "VarHandleOp",
            [],
            {
                "shared_name": self._counter_of(node),
                "container": "",
                "dtype": tf.int64,
                "shape": _STATE,
            },
            "state",
        )[0]
        algorithm = writer.constant(np.array(_PHILOX, np.int32))
        count = _count(writer, node, shape)
        state = writer.op("RngReadAndSkip", [handle, algorithm, count], {})[0]
        last = writer.last
        bits = writer.op("Bitcast", [state], {"type": tf.uint64})[0]
        counter, key = (
            _part(writer, bits, begin, size) for begin, size in ((0, 2), (2, 1))
        )
        stateless_inputs = [shape, key, counter, algorithm, *inputs[1:]]
        takes_dtype = len(inputs) == 1
        attributes = {"dtype": node.attribute("dtype")} if takes_dtype else {}
        drawn = writer.op(STATEFUL[node.type], stateless_inputs, attributes, node.name)
        writer.last = last
        return drawn

    def _counter_of(self, node: Node) -> str:
        """The name of the node's counter, which exists from then on."""
        name = self._counters.get(node.origin)
        if name is None:
            name = f"{self._prefix}_{len(self._counters)}"
            self._counters[node.origin] = name
            seeds = _seeds_of(node)
            first, second = seeds or (self._new_seed(), self._new_seed())
            numbers = [0, second % (1 << 64), first % (1 << 64)]
            value = np.array(numbers, np.uint64).view(np.int64)
            _assign(name, value)
            if seeds is not None:
                self._first_states[name] = value
                self._canary = self._canary or _Canary()
        return name

    # --- the host ---------------------------------------------------------------------

    def _from_host(
        self, writer: OpWriter, node: Node, inputs: Sequence[Ref]
    ) -> list[Ref]:
        """A call of the host."""
        host = self._hosts.get(node.origin)
        if host is None:
            host = self._hosts[node.origin] = self._host_of(node)
        dtypes = [value.dtype for value in node.outputs]
        attributes = {"token": host.token, "Tout": dtypes}
        drawn = writer.op("PyFunc", [list(inputs)], attributes, node.name)
        last = writer.last
        # TensorFlow's shape for other outputs than the first is not always right.
        first, *others = drawn
        ensured = writer.ensure_shape(first, node.outputs[0].shape)
        writer.last = last
        return [ensured, *others]

    def _host_of(self, node: Node) -> HostFunction:
        seeds = _seeds_of(node)
        first, second = seeds or (self._new_seed(), self._new_seed())
        kernel = _KeptKernel(node, {"seed": first, "seed2": second})
        if seeds is not None:
            self._seeded.append(kernel)
            self._canary = self._canary or _Canary()
        return HostFunction(kernel)


class _KeptKernel:
    """An op in a graph that has nothing else, in a session that keeps its kernel.

    The session runs in the thread that calls it: a function would wait for a thread of
    TensorFlow's pool, which has none left if the program holds the only one.
    """

    def __init__(self, node: Node, attributes: dict[str, int]) -> None:
        self._graph = tf.Graph()
        definition = tf.compat.v1.GraphDef()
        message = definition.node.add()
        message.name, message.op = "draw", node.type
        for key, value in node.attributes.items():
            message.attr[key].CopyFrom(value)
        for key, number in attributes.items():
            message.attr[key].i = number
        with self._graph.as_default():
            self._inputs = [
                tf.compat.v1.placeholder(value.dtype) for value in node.inputs
            ]
        message.input.extend(tensor.name for tensor in self._inputs)
        mapped = {tensor.name: tensor for tensor in self._inputs}
        tf_functions.import_nodes(self._graph, definition, mapped)
        self._outputs = tf_functions.operation(self._graph, "draw").outputs
        self._run = self._begun()

    def _begun(self) -> Callable[..., list[Array]]:
        config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=-1)
        session = tf.compat.v1.Session(graph=self._graph, config=config)
        draw: Callable[..., list[Array]] = session.make_callable(
            list(self._outputs), self._inputs
        )
        return draw

    def restart(self) -> None:
        """Begin the op's sequence anew."""
        self._run = self._begun()

    def __call__(self, *arrays: Array) -> list[Array]:
        return [np.asarray(drawn) for drawn in self._run(*arrays)]


class _Canary:
    """Tells whether TensorFlow has cleared its kernels since the last question.

    It draws from a seed, and sees whether the first number comes again.
    """

    def __init__(self) -> None:
        writer = OpWriter("tfcluster_canary")
        shape = writer.constant(np.array([], np.int32))
        bounds = [
            writer.constant(np.array(bound, np.int64))
            for bound in (_LARGEST.min, _LARGEST.max)
        ]
        seeds = {"seed": 1, "seed2": 2}
        outputs = writer.op("RandomUniformInt", [shape, *bounds], seeds, "draw")
        self._name = writer.name
        tf_functions.register(writer.finish(outputs, ["draw"]))
        self._first = self._next()

    def is_new(self) -> bool:
        return self._next() == self._first

    def _next(self) -> int:
        return int(tf_functions.call(self._name, [], 1)[0])


def _whole_shape(writer: OpWriter, node: Node, inputs: Sequence[Ref]) -> Ref:
    """The shape of all numbers that a node draws."""
    if node.type != "RandomGamma":
        return inputs[0]
    # Its shape is that of the numbers for each of the parameters.
    shape, parameters = inputs
    own = writer.op("Shape", [parameters], {"out_type": shape.dtype})[0]
    axis = writer.constant(np.array(0, np.int32))
    return writer.op("ConcatV2", [[shape, own], axis], {})[0]


def _count(writer: OpWriter, node: Node, shape: Ref) -> Ref:
    elements = elements_of(node.outputs[0].shape)
    if elements is not None:
        return writer.constant(np.array(elements, np.uint64))
    axes = writer.constant(np.array([0], np.int32))
    product = writer.op("Prod", [shape, axes], {"keep_dims": False})
    return writer.op("Cast", product, {"DstT": tf.uint64})[0]


def _part(writer: OpWriter, bits: Ref, begin: int, size: int) -> Ref:
    bounds = [writer.constant(np.array([n], np.int32)) for n in (begin, size)]
    return writer.op("Slice", [bits, *bounds], {})[0]


def _seeds_of(node: Node) -> Seeds | None:
    """The seeds of an op; None if TensorFlow chooses them."""
    seeds = node.attribute("seed") or 0, node.attribute("seed2") or 0
    return None if seeds == (0, 0) else seeds


def _assign(name: str, value: Array) -> None:
    handle = tf.raw_ops.VarHandleOp(
        shared_name=name, container="", dtype=tf.int64, shape=_STATE
    )
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(value))
