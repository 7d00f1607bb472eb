"""Track which tensors the program itself has combined over the ranks.

A program that applies such tensors as gradients distributes its training by itself.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfcluster.runtime.scripts import self_distributed
from tfcluster.runtime.tensor_types import Gradient, Tensor


class ReducedTensors:
    """Tensors that were combined: in graphs, and eagerly since the last ``applied``."""

    def __init__(self) -> None:
        self._ops: weakref.WeakKeyDictionary[Any, set[str]] = (
            weakref.WeakKeyDictionary()
        )
        self._gradients: weakref.WeakKeyDictionary[Any, set[str]] = (
            weakref.WeakKeyDictionary()
        )
        self._eager: dict[int, weakref.ref[Any]] = {}
        self._shapes: Counter[tuple[int, ...]] = Counter()

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Record tensors that the program has got from a reduction."""
        if self_distributed.claimed():
            return
        for tensor in map(_values, tensors):
            if isinstance(tensor, tf.__internal__.EagerTensor):
                self._eager[id(tensor)] = weakref.ref(tensor)
                self._shapes[tuple(tensor.shape)] += 1
            else:
                self._ops.setdefault(tensor.graph, set()).add(tensor.op.name)

    def gradients(self, found: Any) -> None:
        """Record a tape's gradients: a search back through the graph ends there."""
        for tensor in map(_values, tf.nest.flatten(found)):
            if tensor is not None and not isinstance(
                tensor, tf.__internal__.EagerTensor
            ):
                self._gradients.setdefault(tensor.graph, set()).add(tensor.op.name)

    def applied(self, gradients: Sequence[Gradient]) -> bool:
        """Whether the gradients being applied were computed from recorded tensors."""
        found = [_values(gradient) for gradient in gradients if gradient is not None]
        eager = [t for t in found if isinstance(t, tf.__internal__.EagerTensor)]
        others = [t for t in found if not isinstance(t, tf.__internal__.EagerTensor)]
        made = self._made_eagerly(eager) or any(map(self._made_in_graph, others))
        self._eager.clear()
        self._shapes.clear()
        return made

    def _made_eagerly(self, gradients: Sequence[Gradient]) -> bool:
        for gradient in gradients:
            known = self._eager.get(id(gradient))
            if known is not None and known() is gradient:
                return True
        # They may have been clipped or cast since. A scalar's shape would prove
        # nothing.
        shapes = Counter(tuple(gradient.shape) for gradient in gradients)
        return any(shapes) and shapes <= self._shapes

    def _made_in_graph(self, gradient: Gradient) -> bool:
        graph = gradient.graph
        if not (ops := self._ops.get(graph)):
            return False
        stops = self._gradients.get(graph, set())
        seen: set[str] = set()
        waiting = [gradient.op]
        while waiting:
            op = waiting.pop()
            if op.name in seen:
                continue
            seen.add(op.name)
            if op.name in ops:
                return True
            if op.name not in stops:
                waiting.extend(tensor.op for tensor in op.inputs)
        return False


def _values(tensor: Tensor) -> Any:
    return tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor


reduced = ReducedTensors()
"""This process's record."""
