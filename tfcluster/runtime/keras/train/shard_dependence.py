"""Finds which tensors of a graph depend on the rows of a single shard.

All other tensors are the same for all shards, and so on all ranks: weights, the
gradient of the whole batch, and everything that is computed from these.
"""

from __future__ import annotations

from collections.abc import Iterable

from tfcluster.runtime import tf_internals
from tfcluster.runtime.tensor_types import Graph, Tensor, Variable


class ShardDependence:
    """Follows the operations that are added to ``graph``, in their order."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._names: set[str] = set()
        """The names of dependent tensors, and of handles of dependent variables."""
        self._outer: set[int] = set()
        """The ids of handles of dependent variables outside of the graph."""
        self._looked = len(graph.get_operations())

    def begin_with(self, tensors: Iterable[Tensor]) -> None:
        """Mark these tensors as rows of a shard."""
        self._names.update(tensor.name for tensor in tensors)

    def follow(self) -> None:
        """Process the operations that shards have added."""
        operations = self._graph.get_operations()
        for operation in operations[self._looked :]:
            if any(tensor.name in self._names for tensor in operation.inputs):
                self._names.update(tensor.name for tensor in operation.outputs)
                self._names.update(
                    tensor.name
                    for tensor in operation.inputs
                    if tf_internals.is_handle(tensor)
                    and tf_internals.may_write(operation, tensor)
                )
        self._looked = len(operations)

    def skip(self) -> None:
        """Skip the new operations, which combine what the shards have computed."""
        self._looked = len(self._graph.get_operations())

    def forget(self, variables: Iterable[Variable]) -> None:
        """Unmark variables that have been set to the same value for all shards."""
        handles = {id(variable.handle) for variable in variables}
        for outer, inner in self._graph.captures:
            if id(outer) in handles:
                self._names.discard(inner.name)

    def is_dependent(self, tensor: Tensor) -> bool:
        """Whether a tensor of the graph may depend on the rows of a shard."""
        self.follow()
        return tensor.name in self._names
