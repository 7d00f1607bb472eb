"""Tracks which tensors the program itself has combined over the ranks.

A program that applies such tensors as gradients distributes its training by itself.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfcluster.runtime import tf_internals
from tfcluster.runtime.scripts import program_kind
from tfcluster.runtime.tensor_types import Gradient, Graph, Nest, Tensor
from tfcluster.runtime.tensors import as_tensor, is_sparse


class ReducedTensors:
    """Tensors that were combined in graphs, or eagerly since the last ``applied``."""

    def __init__(self) -> None:
        # Ops are stored by name, and eager tensors by id.
        self._ops: weakref.WeakKeyDictionary[Graph, set[str]] = (
            weakref.WeakKeyDictionary()
        )
        self._gradients: weakref.WeakKeyDictionary[Graph, set[str]] = (
            weakref.WeakKeyDictionary()
        )
        self._eager: dict[int, weakref.ref[Tensor]] = {}
        self._shapes: Counter[tuple[int | None, ...]] = Counter()

    def note(self, tensors: Iterable[Gradient]) -> None:
        """Record tensors or IndexedSlices that the program got from a reduction."""
        if program_kind.distributes_itself():
            return
        for tensor in _values(tensors):
            if tf_internals.is_eager(tensor):
                self._eager[id(tensor)] = weakref.ref(tensor)
                self._shapes[tuple(tensor.shape)] += 1
            else:
                self._ops.setdefault(tensor.graph, set()).add(tensor.op.name)

    def gradients(
        self, original: Callable[..., Nest], *args: Any, **kwargs: Any
    ) -> Nest:
        """The hook on ``tape.gradient``: a search back through the graph ends there."""
        result = original(*args, **kwargs)
        for tensor in _values(tf.nest.flatten(result)):
            if not tf_internals.is_eager(tensor):
                self._gradients.setdefault(tensor.graph, set()).add(tensor.op.name)
        return result

    def applied(self, gradients: Sequence[Gradient]) -> bool:
        """Whether the gradients being applied were computed from recorded tensors.

        Forgets the eager tensors. In a graph the ops that compute the gradients are
        searched; an eager tensor is recognized by itself or by its shape.
        """
        tensors = _values(gradients)
        eager = [tensor for tensor in tensors if tf_internals.is_eager(tensor)]
        others = [tensor for tensor in tensors if not tf_internals.is_eager(tensor)]
        reduced = self._made_eagerly(eager) or any(map(self._made_in_graph, others))
        self._eager.clear()
        self._shapes.clear()
        return reduced

    def _made_eagerly(self, gradients: Sequence[Tensor]) -> bool:
        for gradient in gradients:
            recorded = self._eager.get(id(gradient))
            if recorded is not None and recorded() is gradient:
                return True
        # The tensors may have been clipped or cast since. A scalar's shape would prove
        # nothing.
        shapes = Counter(tuple(gradient.shape) for gradient in gradients)
        return any(shapes) and shapes <= self._shapes

    def _made_in_graph(self, gradient: Tensor) -> bool:
        graph = gradient.graph
        if not (ops := self._ops.get(graph)):
            return False
        ops_of_gradients = self._gradients.get(graph, set())
        visited: set[str] = set()
        to_visit = [gradient.op]
        while to_visit:
            op = to_visit.pop()
            if op.name in visited:
                continue
            visited.add(op.name)
            if op.name in ops:
                return True
            if op.name not in ops_of_gradients:
                to_visit.extend(tensor.op for tensor in op.inputs)
        return False


def _values(gradients: Iterable[Gradient]) -> list[Tensor]:
    """The tensors of the gradients that are not None.

    A program that accumulates gradients may apply variables.
    """
    return [
        gradient.values if is_sparse(gradient) else as_tensor(gradient)
        for gradient in gradients
        if gradient is not None
    ]


reduced = ReducedTensors()
"""This process's record."""
