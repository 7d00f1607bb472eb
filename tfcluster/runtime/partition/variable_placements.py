"""Which variables a program divides: those of its optimizers. Pure.

A rank needs an optimizer's variable, such as Adam's moments, only for the update of the
same entries of a weight. So all ranks may hold and update a piece each (ZeRO-1: S.
Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", 2020). No optimizer is known here: it is every variable of which a program that
trains only needs pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tfcluster.runtime.partition.functions import LOOPS
from tfcluster.runtime.partition.graph import Node, OpGraph, Value, sizes_of
from tfcluster.runtime.partition.placed import Placed
from tfcluster.runtime.partition.placement import Shape, Shard
from tfcluster.runtime.partition.rules.table import LocalPlan
from tfcluster.runtime.tensor_types import DType

LEAST_BYTES = 16 << 10
"""A smaller variable stays whole: an exchange of its pieces would save nothing."""
_READ = "ReadVariableOp"
_ASSIGNS = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")

OTHER_USE = "they are not only read and assigned"
SMALL = f"they are no floats of {LEAST_BYTES >> 10} KiB or more"
GATHERED = "an op needs all of them"
"""Why variables are whole."""

VariableShards = Mapping[Value, Shard]
"""How variables are divided, by their handles among a graph's inputs."""


def shard_of(shape: Shape | None, dtype: DType, ranks: int) -> Shard | None:
    """How a variable is divided: along its longest dimension; None if it stays whole.

    It depends on nothing else, so gradients of the shape can be divided alike.
    """
    sizes = sizes_of(shape)
    if not sizes or not dtype.is_floating:
        return None
    longest = max(sizes)
    shard = Shard(sizes.index(longest), longest)
    nbytes = dtype.size
    for size in sizes:
        nbytes *= size
    return shard if longest >= ranks and nbytes >= LEAST_BYTES else None


def candidates(graph: OpGraph, ranks: int) -> dict[Value, Shard]:
    """The variables that may be divided among so many ranks; see ``division``."""
    divisions = {
        handle: division(handle, graph, ranks)
        for handle in graph.inputs
        if handle.is_handle
    }
    return {h: shard for h, shard in divisions.items() if isinstance(shard, Shard)}


def division(handle: Value, graph: OpGraph, ranks: int) -> Shard | str:
    """How a variable may be divided, or why it is whole.

    The graph, its loops and its branches read and assign it, and use what they have
    read for tensors of the same shape only. A weight is not divided, as a layer has
    another output.
    """
    uses = uses_of(handle, graph)
    if uses is None or not uses.reads or not uses.assigned:
        return OTHER_USE
    read = uses.reads[0]
    shard = shard_of(read.shape, read.dtype, ranks)
    if shard is None:
        return SMALL
    for node in (node for value in uses.reads for node in uses.users[value]):
        outputs = () if node.is_folded else node.outputs
        if any(output.shape != read.shape for output in outputs):
            return f"{node.type} needs all of them"
    if any(value.shape != read.shape for value in uses.assigned):
        return OTHER_USE
    return shard


@dataclass(slots=True)
class Uses:
    """How a graph, and its loops and branches, use a variable."""

    reads: list[Value] = field(default_factory=list)
    users: dict[Value, list[Node]] = field(default_factory=dict)
    """The nodes that use each of the reads."""
    assigned: list[Value] = field(default_factory=list)


def uses_of(handle: Value, graph: OpGraph, uses: Uses | None = None) -> Uses | None:
    """The uses of a variable; None if it is not only read and assigned."""
    uses = Uses() if uses is None else uses
    for node in graph.nodes:
        for place, value in enumerate(node.inputs):
            if value is not handle:
                if value in uses.users:
                    uses.users[value].append(node)
                continue
            if node.type == _READ:
                uses.reads.append(node.outputs[0])
                uses.users[node.outputs[0]] = []
            elif is_assignment(node):
                uses.assigned.append(node.inputs[1])
            elif not node.bodies:
                return None
            for body in node.bodies:
                if uses_of(body.inputs[_within(node, place)], body, uses) is None:
                    return None
    return uses


def _within(node: Node, place: int) -> int:
    """The place of an input of a loop or of a branch among those of its bodies."""
    return place if node.type in LOOPS else place - 1


def is_assignment(node: Node) -> bool:
    """Whether the node assigns a variable, to which a whole value is gathered."""
    return node.type in _ASSIGNS


def by_shape(graph: OpGraph, variables: VariableShards) -> dict[Shape, Shard]:
    """How these variables are divided, by their shapes."""
    shards: dict[Shape, Shard] = {}
    for handle, shard in variables.items():
        uses = uses_of(handle, graph)
        assert uses is not None
        assert uses.reads[0].shape is not None
        shards[uses.reads[0].shape] = shard
    return shards


def disagreeing(placed: Placed, variables: VariableShards) -> set[Value]:
    """Those of the variables with whose placement some of their uses do not agree.

    A variable whose pieces would be gathered had better be whole, unless it is for what
    a weight is assigned.
    """
    return {h for h, shard in variables.items() if _is_gathered(h, shard, placed)}


def _is_gathered(handle: Value, shard: Shard, placed: Placed) -> bool:
    """Whether a node needs all of a variable, or assigns what is divided otherwise."""
    reads: set[Value] = set()
    for node in placed.nodes:
        if node.is_folded:
            continue
        is_used = not reads.isdisjoint(node.inputs) and not is_assignment(node)
        if is_used and not _is_by_elements(node, placed.plans[node], shard):
            return True
        if handle not in node.inputs:
            continue
        if node.type == _READ:
            reads.add(node.outputs[0])
        elif is_assignment(node):
            held = placed.placements[node.inputs[1]]
            if isinstance(held, Shard) and held != shard:
                return True
        for body in placed.bodies.get(node, ()):
            own = body.graph.inputs[_within(node, node.inputs.index(handle))]
            if _is_gathered(own, shard, body):
                return True
    return not reads.isdisjoint(placed.graph.outputs)


def _is_by_elements(node: Node, plan: LocalPlan, shard: Shard) -> bool:
    """Whether a node combines pieces element by element.

    So does no matrix product: it could take pieces of a weight, too.
    """
    wants = zip(node.inputs, plan.want, strict=True)
    return all(
        isinstance(want, Shard) or value.elements == 1 for value, want in wants
    ) and all(placement == shard for placement in plan.outputs)
