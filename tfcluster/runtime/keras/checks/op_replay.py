"""Recomputes a number from other inputs, without running the program again.

In a graph under construction the operations are known; eager operations are recorded
as they run. Only operations that depend on the replaced inputs are computed again. All
others keep their values, so variables and random numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import tensorflow as tf

from tfcluster.runtime import contract, tf_internals
from tfcluster.runtime.tensor_types import Tensor

_T = TypeVar("_T")

_HELD = "tfcluster_held"
"""The name of operations in graphs whose results are held."""
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
_RANDOM = ("Random", "Stateless", "Parameterized", "Truncated", "Multinomial", "Rng")
_STATELESS_CONTROL = ("StatelessIf", "StatelessWhile", "StatelessCase")


@dataclass(frozen=True, slots=True)
class Op:
    """An operation that was executed, or added to a graph."""

    kind: str
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    functions: Sequence[str]
    """The names of functions that it calls."""
    run: Callable[[list[Any]], Sequence[Any]]
    """Computes the outputs from other inputs."""
    held: bool = False
    """Whether its results keep their values."""


class Holds:
    """Tensors that keep their values in every replay."""

    def __init__(self) -> None:
        self.recording = False
        """Whether to record eager tensors."""
        self.eager: dict[Any, Any] = {}
        """The held eager tensors, by their keys."""

    def hold(self, tensor: Tensor) -> Any:
        """Mark ``tensor`` as held; use the returned tensor instead of it."""
        if not tf.executing_eagerly():
            return tf.identity(tensor, name=_HELD)
        if self.recording:
            self.eager[key_of(tensor)] = tensor
        return tensor


def attached(graph: Any, name: str, make: Callable[[], _T]) -> _T:
    """An object of ours that lives as long as ``graph``; made if it does not exist."""
    if not hasattr(graph, name):
        contract.mark(graph, name, make())
    found: _T = getattr(graph, name)
    return found


def key_of(tensor: Tensor) -> Any:
    """A tensor's identity: in a graph its name, since its Python object may vary."""
    return id(tensor) if hasattr(tensor, "numpy") else tensor.name


@dataclass(slots=True)
class Recording:
    """The operations that this thread has executed eagerly."""

    ops: list[Op] = field(default_factory=list)

    def __call__(
        self,
        kind: Any,
        inputs: Any,
        attrs: Any,
        outputs: Any,
        op_name: Any = None,
        graph: Any = None,
    ) -> None:
        if graph is not None or not outputs:
            return
        name = kind.decode() if isinstance(kind, bytes) else str(kind)

        def run(values: list[Any]) -> Sequence[Any]:
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


def ops_of(graph: Any) -> list[Op]:
    """The operations of a graph, in the order in which they were added."""
    return [_op(operation) for operation in graph.get_operations()]


def _op(operation: Any) -> Op:
    def run(values: list[Any]) -> Sequence[Any]:
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
        outputs: Sequence[Any] = again.outputs
        return outputs

    return Op(
        operation.type,
        list(operation.inputs),
        list(operation.outputs),
        _functions(operation),
        run,
        _is_held(operation.name),
    )


def _functions(operation: Any) -> list[str]:
    found = []
    for definition in operation.op_def.attr:
        if definition.type not in ("func", "list(func)"):
            continue
        value = operation.node_def.attr[definition.name]
        found += [function.name for function in [value.func, *value.list.func]]
    return [name for name in found if name]


def path_between(
    ops: Iterable[Op], inputs: Iterable[Any], target: Any, held: Collection[Any]
) -> list[Op] | None:
    """The operations that compute ``target`` from ``inputs``, in order.

    ``held`` are the keys of tensors that keep their values. None if the operations
    cannot be repeated without side effects.
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


def replay(path: Iterable[Op], inputs: dict[Any, Any], target: Any) -> Any:
    """The value of ``target`` for other values of ``inputs``, given by their keys."""
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
    definition = tf_internals.context().get_function_def(function)
    for node in definition.node_def:
        called = [value.func.name for value in node.attr.values() if value.func.name]
        called += [f.name for value in node.attr.values() for f in value.list.func]
        if tf_internals.op_definition(node.op) is None:
            called.append(node.op)
        if _is_held(node.name) or not _is_repeatable(node.op, called):
            return False
    return True
