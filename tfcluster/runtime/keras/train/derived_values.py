"""Numbers that a traced step makes of other numbers, made once more of other values.

A step may log the exponential of a metric's result. The mean of the ranks' exponentials
is not the exponential of the mean, so what has been merged over the ranks has to pass
through the same ops again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfcluster.runtime import tf_internals

_MOST_OPS = 200
"""More than these make no number of other numbers: it is a model."""


@dataclass(frozen=True, slots=True)
class Ancestry:
    """What a tensor of a graph is computed from, up to the tensors that are given."""

    ops: tuple[Any, ...]
    sources: tuple[Any, ...]
    """Those of the given tensors that it needs."""
    closed: bool
    """Whether it needs nothing else: no data, no variable, no random number."""
    sees_data: bool
    """Whether it needs an input of the graph that is no variable."""


def ancestry(tensor: Any, given: Mapping[int, Any]) -> Ancestry:
    """Look from ``tensor`` back to the ``given`` tensors (by id) and beyond."""
    ops: dict[int, Any] = {}
    sources: dict[int, Any] = {}
    closed, sees_data = True, False
    waiting = [tensor.op]
    while waiting:
        op = waiting.pop()
        if id(op) in ops:
            continue
        ops[id(op)] = op
        if op.type == "Placeholder":
            closed = False
            outer = _captured(op)
            if outer is None:
                sees_data = sees_data or op.outputs[0].dtype != tf.resource
            elif not hasattr(outer, "numpy"):
                waiting.append(outer.op)
        elif tf_internals.is_stateful(op) or _calls_functions(op):
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


def _captured(placeholder: Any) -> Any:
    """What a function's graph has taken from outside, which this stands for."""
    for outer, inner in getattr(placeholder.graph, "captures", ()):
        if inner is placeholder.outputs[0]:
            return outer
    return None


class Derived:
    """The ops between some tensors of a graph and one that is made of them."""

    def __init__(self, tensor: Any, found: Ancestry) -> None:
        self.sources = found.sources
        self._tensor = tensor
        self._function = _function(tensor, found)

    def of(self, values: Sequence[Any]) -> Any:
        """What becomes of ``values`` in place of the sources."""
        given = [
            tf.constant(value, source.dtype, source.shape)
            for value, source in zip(values, self.sources, strict=True)
        ]
        return self._function(*given).numpy()


def _calls_functions(op: Any) -> bool:
    return any(
        attribute.HasField("func") or attribute.list.func
        for attribute in op.node_def.attr.values()
    )


def _function(tensor: Any, found: Ancestry) -> Any:
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
    def function(*values: Any) -> Any:
        (result,) = tf.graph_util.import_graph_def(
            definition,
            input_map=dict(zip(names, values, strict=True)),
            return_elements=[tensor.name],
            name="",
        )
        return result

    return function
