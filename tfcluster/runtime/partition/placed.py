"""What propagation finds: a graph with a placement for every tensor."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import tensorflow as tf

from tfcluster.runtime.partition.graph import Node, OpGraph, Value
from tfcluster.runtime.partition.placement import (
    REPLICATE,
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
    divides_strings: bool = True
    """Whether a rank may compute its rows of strings only."""
    table_rows: frozenset[int] = frozenset()
    """Tensors of so many rows are divided by them."""
    reduced: dict[Value, Placement] = field(default_factory=dict)
    """Partial values that are reduced at once, to this placement, since a node needs
    their sum: all of it or a piece."""

    @property
    def outputs(self) -> list[Placement]:
        return [at_home(self.placements[value]) for value in self.graph.outputs]

    def gathers_strings(self, whole: AbstractSet[Value] = frozenset()) -> bool:
        """Whether somebody needs all of strings of which a rank has its rows.

        Ranks exchange no strings. Those of ``whole`` are there as a whole, too.
        """
        wants = [
            (value, want)
            for node, plan in self.plans.items()
            for value, want in zip(node.inputs, plan.want, strict=not node.is_folded)
        ]
        wants += [(value, REPLICATE) for value in self.graph.outputs]
        return any(
            holds_strings(value)
            and value not in whole
            and is_whole(want)
            and not is_whole(self.placements[value])
            for value, want in wants
        ) or any(b.gathers_strings() for bodies in self.bodies.values() for b in bodies)

    def exchanges(self) -> bool:
        """Whether the placements are not all the same as on one machine."""
        if not all(map(is_whole, self.placements.values())):
            return True
        return any(b.exchanges() for bodies in self.bodies.values() for b in bodies)


def holds_strings(value: Value) -> bool:
    """Whether it is a tensor or a list of strings."""
    return tf.string in (value.dtype, None if value.list is None else value.list.dtype)
