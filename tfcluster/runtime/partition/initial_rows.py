"""Makes some rows of a large tensor, with the bits that they have in the whole."""

from __future__ import annotations

from typing import Any

from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.draws import Draws
from tfcluster.runtime.partition.functions import parsed
from tfcluster.runtime.partition.placement import REPLICATE, Ranks, Shard, Split
from tfcluster.runtime.partition.propagate import has_effect, propagate
from tfcluster.runtime.partition.rewrite import rewrite
from tfcluster.runtime.partition.rules.random import is_stateful_draw
from tfcluster.runtime.partition.shape_graph import Argument
from tfcluster.runtime.partition.specialise import specialise
from tfcluster.runtime.tensor_types import Tensor


class RowMaker:
    """Computes parts of the tensor that a traced function returns.

    ``traced`` is a ``ConcreteFunction`` without arguments that returns one tensor.
    Raises NotImplementedError if its rows depend on all rows, or on a state.
    """

    def __init__(self, traced: Any, rows: int) -> None:
        self._inputs: list[Tensor] = list(traced.captured_inputs)
        graph = specialise(
            parsed(traced.function_def), [Argument.of(each) for each in self._inputs]
        )
        whole = [REPLICATE] * len(self._inputs)
        self._placed = propagate(graph, whole, rows, table_rows=frozenset([rows]))
        if self._placed.outputs != [Shard(0, rows)]:
            raise NotImplementedError("its rows depend on all rows")
        if any(has_effect(n) or is_stateful_draw(n) for n in graph.all_nodes()):
            raise NotImplementedError("it has a state")

    def rows(self, split: Split) -> Tensor:
        """The rows of a rank."""
        written = rewrite(
            self._placed,
            "tfcluster_rows",
            Ranks(split.size, (split.rank,)),
            None,
            Draws(lambda: 0),
            visible=0,
        )
        tf_functions.register(written.definitions[0])
        try:
            return tf_functions.call(written.name, self._inputs, 1)[0]
        finally:
            tf_functions.forget(written.name)
