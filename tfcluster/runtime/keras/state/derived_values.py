"""Recomputes numbers that a traced step derives from other numbers.

A step may log the exponential of a metric's result. The mean of the ranks' exponentials
is not the exponential of the mean. So values that were merged over the ranks must pass
through the same ops again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime import tf_internals
from tfcluster.runtime.tensor_types import Array, Operation, Tensor

_MOST_OPS = 200
"""A number that needs more ops is treated as a model's output, not as derived from
logs."""


@dataclass(frozen=True, slots=True)
class Ancestry:
    """The ops and tensors from which a graph tensor is computed."""

    ops: tuple[Operation, ...]
    sources: tuple[Tensor, ...]
    """The given tensors on which it depends."""
    closed: bool
    """Whether the tensor depends on nothing else: data, variables, random numbers."""
    sees_data: bool
    """Whether the tensor depends on an input of the graph other than a variable."""


def ancestry(tensor: Tensor, given: Mapping[int, object]) -> Ancestry:
    """Search from a graph's ``tensor`` backwards, as far as the ``given`` values.

    The keys of ``given`` are the ids of its values.
    """
    ops: dict[int, Operation] = {}
    sources: dict[int, Tensor] = {}
    closed, sees_data = True, False
    waiting = [tensor.op]
    while waiting:
        op = waiting.pop()
        if id(op) in ops:
            continue
        ops[id(op)] = op
        if op.type == "Placeholder":
            closed = False
            outer = captured(op)
            if outer is None:
                sees_data = sees_data or op.outputs[0].dtype != tf.resource
            elif not hasattr(outer, "numpy"):
                waiting.append(outer.op)
        elif tf_internals.is_stateful(op) or calls_functions(op):
            closed = False
        for source in op.inputs:
            if id(source) in given and source is not tensor:
                sources[id(source)] = source
            else:
                waiting.append(source.op)
    return Ancestry(
        tuple(ops.values()),
        tuple(sources.values()),
        closed and bool(sources) and len(ops) <= _MOST_OPS,
        sees_data,
    )


def captured(placeholder: Operation) -> Tensor | None:
    """The outer tensor that a function captured as this placeholder, or None."""
    for outer, inner in getattr(placeholder.graph, "captures", ()):
        if inner is placeholder.outputs[0]:
            found: Tensor = outer
            return found
    return None


class Derived:
    """The ops that lead from some tensors of a graph to one derived from them."""

    def __init__(self, tensor: Tensor, found: Ancestry) -> None:
        self.sources = found.sources
        self._function = _function(tensor, found)

    def of(self, values: Sequence[Array | np.generic | float]) -> Array | np.generic:
        """Compute the derived tensor with ``values`` in place of the sources.

        Values have the sources' shapes. Raises what the ops raise.
        """
        given = [
            tf.constant(value, source.dtype, source.shape)
            for value, source in zip(values, self.sources, strict=True)
        ]
        result: Array | np.generic = self._function(*given).numpy()
        return result


def calls_functions(op: Operation) -> bool:
    """Whether an op calls functions; branches and bodies of loops are functions."""
    return any(
        attribute.HasField("func") or attribute.list.func
        for attribute in op.node_def.attr.values()
    )


def _function(tensor: Tensor, found: Ancestry) -> Callable[..., Any]:
    definition = tf.compat.v1.GraphDef()
    definition.versions.CopyFrom(tensor.graph.graph_def_versions)
    for op in found.ops:
        node = definition.node.add()
        node.CopyFrom(op.node_def)
        inputs = [name for name in node.input if not name.startswith("^")]
        node.ClearField("input")
        node.input.extend(inputs)
    names = [source.name for source in found.sources]

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def function(*values: Tensor) -> Tensor:
        result: Tensor
        (result,) = tf.graph_util.import_graph_def(
            definition,
            input_map=dict(zip(names, values, strict=True)),
            return_elements=[tensor.name],
            name="",
        )
        return result

    compiled: Callable[..., Any] = function
    return compiled
