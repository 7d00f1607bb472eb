"""Recomputes a number from other inputs, without running the program again.

In a graph under construction the operations are known; eager operations are recorded as
they run. Only operations that depend on the replaced inputs are computed again. All
others keep their values, so variables and random numbers are the same. The method is
tfcluster's own.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfcluster.runtime import tf_internals
from tfcluster.runtime.keras.checks.types import TensorKey
from tfcluster.runtime.tensor_types import Tensor

_HELD = "tfcluster_held"
"""The name, in graphs, of operations whose results are held."""
_READS = {
    "Assert",
    "Case",
    "If",
    "PartitionedCall",
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
    "StatefulPartitionedCall",
    "VariableShape",
    "While",
}
"""Stateful operations that change nothing, if the functions they call do not."""
_SUMS = {"Add", "AddN", "AddV2", "Cast", "Identity", "Mul", "Sub"}
_RANDOM = ("Random", "Stateless", "Parameterized", "Truncated", "Multinomial", "Rng")
_STATELESS_CONTROL = ("StatelessIf", "StatelessWhile", "StatelessCase")


@dataclass(frozen=True, slots=True)
class Op:
    """An operation that was executed, or added to a graph."""

    kind: str
    """TensorFlow's name of the type of operation, such as ``AddV2``."""
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    functions: Sequence[str]
    """The names of the functions that the operation calls."""
    run: Callable[[list[Tensor]], Sequence[Tensor]]
    """Computes the outputs for other inputs."""
    held: bool = False
    """Whether the operation's results keep their values."""


class Holds:
    """Tensors that keep their values in every replay."""

    def __init__(self) -> None:
        self.recording = False
        """Whether to record eager tensors."""
        self.eager: dict[TensorKey, Tensor] = {}
        """The held eager tensors, by their keys."""

    def hold(self, tensor: Tensor) -> Tensor:
        """Mark ``tensor`` as held; use the returned tensor, an equal one, instead."""
        if not tf.executing_eagerly():
            return tf.identity(tensor, name=_HELD)
        if self.recording:
            self.eager[key_of(tensor)] = tensor
        return tensor


def key_of(tensor: Tensor) -> TensorKey:
    """A tensor's identity: its name in a graph, where its Python object may vary."""
    return id(tensor) if hasattr(tensor, "numpy") else str(tensor.name)


@dataclass(slots=True)
class Recording:
    """The operations that this thread has executed eagerly."""

    ops: list[Op] = field(default_factory=list)

    def __call__(
        self,
        kind: str | bytes,
        inputs: Sequence[Tensor],
        attrs: Sequence[Any],
        outputs: Sequence[Tensor],
        op_name: str | None = None,
        graph: tf.Graph | None = None,
    ) -> None:
        """Record an operation; TensorFlow calls this after it has executed one.

        ``attrs`` has the operation's attributes: a name, its value, a name, ...
        """
        if graph is not None or not outputs:
            return
        name = kind.decode() if isinstance(kind, bytes) else str(kind)

        def run(values: list[Tensor]) -> Sequence[Tensor]:
            return tf_internals.execute(name, len(outputs), values, attrs)

        called = [] if tf_internals.op_definition(name) else [name]
        named = zip(attrs[::2], attrs[1::2], strict=True)
        called += [str(value) for key, value in named if key in ("f", "cond", "body")]
        self.ops.append(Op(name, tuple(inputs), tuple(outputs), called, run))


@contextmanager
def recorded() -> Iterator[Recording]:
    """Record the operations that this thread executes eagerly."""
    recording = Recording()
    tf_internals.observe_ops(recording)
    try:
        yield recording
    finally:
        tf_internals.stop_observing_ops(recording)


def ops_of(graph: tf.Graph) -> list[Op]:
    """The operations of a graph, in the order in which they were added."""
    return [_op(operation) for operation in graph.get_operations()]


def _op(operation: tf.Operation) -> Op:
    def run(values: list[Tensor]) -> Sequence[Tensor]:
        attrs = operation.node_def.attr
        again = tf.compat.v1.get_default_graph().create_op(
            operation.type,
            values,
            [output.dtype for output in operation.outputs],
            attrs={name: attrs[name] for name in attrs if not name.startswith("_")},
            op_def=operation.op_def,
        )
        for output, before in zip(again.outputs, operation.outputs, strict=True):
            output.set_shape(before.shape)
        outputs: Sequence[Tensor] = again.outputs
        return outputs

    return Op(
        operation.type,
        list(operation.inputs),
        list(operation.outputs),
        _functions(operation),
        run,
        _is_held(operation.name),
    )


def _functions(operation: tf.Operation) -> list[str]:
    found = []
    for definition in operation.op_def.attr:
        if definition.type not in ("func", "list(func)"):
            continue
        value = operation.node_def.attr[definition.name]
        found += [function.name for function in [value.func, *value.list.func]]
    return [name for name in found if name]


def path_between(
    ops: Iterable[Op],
    inputs: Iterable[Tensor],
    target: Tensor,
    held: Collection[TensorKey],
) -> list[Op] | None:
    """The operations that compute ``target`` from ``inputs``, in order.

    ``held`` are the keys of tensors that keep their values. Returns None if the
    operations cannot be repeated without side effects.
    """
    moved = {key_of(tensor) for tensor in inputs}
    dependent = []
    for op in ops:
        if op.held or _is_random(op.kind):
            continue
        if any(key_of(tensor) in moved for tensor in op.inputs):
            dependent.append(op)
            moved |= {key_of(output) for output in op.outputs}.difference(held)
    wanted, path = {key_of(target)} & moved, []
    for op in reversed(dependent):
        if any(key_of(output) in wanted for output in op.outputs):
            path.append(op)
            wanted |= {key_of(i) for i in op.inputs} & moved
    if not all(_is_repeatable(op.kind, op.functions) for op in path):
        return None
    return path[::-1]


def addends(ops: Sequence[Op], numbers: Iterable[Tensor]) -> set[TensorKey]:
    """The keys of the numbers and of all tensors that ``ops`` add or scale for them."""
    by_output = {key_of(output): op for op in ops for output in op.outputs}
    found: set[TensorKey] = set()
    left = [key_of(number) for number in numbers]
    while left:
        key = left.pop()
        op = by_output.get(key)
        if key not in found and op is not None and op.kind in _SUMS:
            left += [key_of(tensor) for tensor in op.inputs]
        found.add(key)
    return found


def uses_draws(ops: Iterable[Op], path: Iterable[Op]) -> bool:
    """Whether an operation of ``path`` uses random numbers, drawn by one of ``ops``."""
    drawn: set[TensorKey] = set()
    for op in ops:
        if (
            _is_random(op.kind)
            or any(map(_draws, op.functions))
            or any(key_of(tensor) in drawn for tensor in op.inputs)
        ):
            drawn |= {key_of(output) for output in op.outputs}
    return any(key_of(output) in drawn for op in path for output in op.outputs)


def detached_numbers(ops: Iterable[Op], rows: int | None) -> list[Tensor]:
    """The results of ``tf.stop_gradient`` among ``ops`` that have no axis of rows.

    ``rows`` is the first dimension of the batch, if it is known.
    """
    results = [op.outputs[0] for op in ops if op.kind == "StopGradient"]
    return [
        result
        for result in results
        if result.shape.rank == 0
        or (result.shape.rank is not None and result.shape[0] not in (None, rows))
    ]


def replay(
    path: Iterable[Op], inputs: Mapping[TensorKey, Tensor], target: Tensor
) -> Tensor:
    """The value of ``target`` for other values of ``inputs``, given by their keys.

    ``path`` is a result of ``path_between``. A value needs the dtype of the tensor that
    it replaces, and a compatible shape.
    """
    values = dict(inputs)
    for op in path:
        found = op.run([values.get(key_of(i), i) for i in op.inputs])
        for output, value in zip(op.outputs, found, strict=True):
            values.setdefault(key_of(output), value)
    return values.get(key_of(target), target)


def _is_held(name: str) -> bool:
    return name.rpartition("/")[2].startswith(_HELD)


def _is_random(kind: str) -> bool:
    return kind.startswith(_RANDOM) and kind not in _STATELESS_CONTROL


def _is_repeatable(kind: str, functions: Sequence[str]) -> bool:
    definition = tf_internals.op_definition(kind)
    if definition is not None and definition.is_stateful and kind not in _READS:
        return False
    return all(map(_changes_nothing, functions))


def _changes_nothing(function: str) -> bool:
    return all(
        not _is_held(node.name) and _is_repeatable(node.op, _called_by(node))
        for node in _nodes(function)
    )


def _draws(function: str) -> bool:
    return any(
        _is_random(node.op) or any(map(_draws, _called_by(node)))
        for node in _nodes(function)
    )


def _nodes(function: str) -> Sequence[Any]:
    nodes: Sequence[Any] = tf_internals.context().get_function_def(function).node_def
    return nodes


def _called_by(node: Any) -> list[str]:
    """The names of the functions that a node of a function calls."""
    called = [value.func.name for value in node.attr.values() if value.func.name]
    called += [f.name for value in node.attr.values() for f in value.list.func]
    if tf_internals.op_definition(node.op) is None:
        called.append(node.op)
    return called
