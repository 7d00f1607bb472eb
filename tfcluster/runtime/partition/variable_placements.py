"""Which variables a program divides: those of its optimizers. Pure.

A rank needs an optimizer's variable, such as Adam's moments, only for the update of the
same entries of a weight. So all ranks may hold and update a piece each (ZeRO-1: S.
Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", 2020). No optimizer is known here: it is every variable of which a program that
trains only needs pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfcluster.runtime.partition.graph import Node, OpGraph, Value, sizes_of
from tfcluster.runtime.partition.placement import REPLICATE, Placement, Shape, Shard
from tfcluster.runtime.partition.rules.table import LocalPlan
from tfcluster.runtime.tensor_types import DType

LEAST_BYTES = 16 << 10
"""A smaller variable stays whole: an exchange of its pieces would save nothing."""
_READ = "ReadVariableOp"
_ASSIGNS = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")

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
    """The variables that may be divided among so many ranks.

    The graph reads and assigns them, and uses what it has read for tensors of the same
    shape only. A weight is none, as a layer has another output.
    """
    uses = _uses(graph.nodes)
    chosen = {}
    for handle in graph.inputs:
        types = {node.type for node, _ in uses.get(handle, ())}
        if not handle.is_handle or not {_READ} < types <= {_READ, *_ASSIGNS}:
            continue
        reads = _reads(uses, handle)
        shard = shard_of(reads[0].shape, reads[0].dtype, ranks)
        outputs = (
            output
            for read in reads
            for node, _ in uses.get(read, ())
            if not node.is_folded
            for output in node.outputs
        )
        if shard is not None and all(o.shape == reads[0].shape for o in outputs):
            chosen[handle] = shard
    return chosen


def plan_of(node: Node, variables: VariableShards) -> LocalPlan | None:
    """The plan for a node that reads or assigns a divided variable; else None."""
    if node.type not in (_READ, *_ASSIGNS):
        return None
    shard = variables.get(node.inputs[0])
    if shard is None:
        return None
    if node.type == _READ:
        return LocalPlan([REPLICATE], [shard])
    return LocalPlan([REPLICATE, shard], [])


def is_assignment(node: Node) -> bool:
    """Whether the node assigns a variable, to which a whole value is gathered."""
    return node.type in _ASSIGNS


def agreeing(
    variables: VariableShards,
    nodes: Sequence[Node],
    outputs: Sequence[Value],
    placements: Mapping[Value, Placement],
    plans: Mapping[Node, LocalPlan],
) -> dict[Value, Shard]:
    """Those of the variables with whose placement all of their uses agree.

    A variable whose pieces would be gathered had better be whole, unless it is for what
    a weight is assigned.
    """
    uses = _uses(nodes)
    agreed = {}
    for handle, shard in variables.items():
        reads = _reads(uses, handle)
        users = [node for read in reads for node, _ in uses.get(read, ())]
        assigned = [
            placements[node.inputs[1]]
            for node, _ in uses.get(handle, ())
            if is_assignment(node)
        ]
        is_gathered = any(read in outputs for read in reads) or any(
            isinstance(placement, Shard) and placement != shard
            for placement in assigned
        )
        if not is_gathered and all(
            _is_by_elements(node, plans[node], shard)
            for node in users
            if not node.is_folded and not is_assignment(node)
        ):
            agreed[handle] = shard
    return agreed


def _is_by_elements(node: Node, plan: LocalPlan, shard: Shard) -> bool:
    """Whether a node combines pieces element by element.

    So does no matrix product: it could take pieces of a weight, too.
    """
    wants = zip(node.inputs, plan.want, strict=True)
    return all(
        isinstance(want, Shard) or value.elements == 1 for value, want in wants
    ) and all(placement == shard for placement in plan.outputs)


_Uses = Mapping[Value, Sequence[tuple[Node, int]]]
"""The nodes that use a value, and as which of their inputs."""


def _uses(nodes: Sequence[Node]) -> _Uses:
    uses: dict[Value, list[tuple[Node, int]]] = {}
    for node in nodes:
        for index, value in enumerate(node.inputs):
            uses.setdefault(value, []).append((node, index))
    return uses


def _reads(uses: _Uses, handle: Value) -> list[Value]:
    return [node.outputs[0] for node, _ in uses.get(handle, ()) if node.type == _READ]
