"""What propagation finds: a graph with a placement for every tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tfcluster.runtime.partition.graph import Node, OpGraph, Value
from tfcluster.runtime.partition.placement import (
    Placement,
    Shape,
    Shard,
    at_home,
    is_whole,
)
from tfcluster.runtime.partition.rules.table import LocalPlan


@dataclass(slots=True)
class Placed:
    """A graph with placements.

    ``rows`` is the number of rows of the batch, or None if nothing is divided.
    """

    graph: OpGraph
    nodes: list[Node]
    """The nodes that run, in order."""
    inputs: list[Placement]
    rows: int | None
    placements: dict[Value, Placement] = field(default_factory=dict)
    plans: dict[Node, LocalPlan] = field(default_factory=dict)
    bodies: dict[Node, tuple[Placed, ...]] = field(default_factory=dict)
    whole: set[Node] = field(default_factory=set)
    """Nodes with divided inputs that have no rule for them."""
    shards: Mapping[Shape, Shard] = field(default_factory=dict)
    """How sums of these shapes are divided: as optimizers' variables of the shapes."""
    table_rows: frozenset[int] = frozenset()
    """Tensors of so many rows are divided by them."""
    reduced: dict[Value, Placement] = field(default_factory=dict)
    """Partial values that are reduced at once, to this placement, since a node needs
    their sum: all of it or a piece."""

    @property
    def outputs(self) -> list[Placement]:
        return [at_home(self.placements[value]) for value in self.graph.outputs]

    def exchanges(self) -> bool:
        """Whether the placements are not all the same as on one machine."""
        if not all(map(is_whole, self.placements.values())):
            return True
        return any(b.exchanges() for bodies in self.bodies.values() for b in bodies)
