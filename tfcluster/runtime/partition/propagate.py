"""Finds a placement for every tensor of a graph, and a plan for every node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from tfcluster.runtime.partition import moments, variable_placements
from tfcluster.runtime.partition.functions import LOOPS
from tfcluster.runtime.partition.graph import Node, OpGraph, Value, elements_of
from tfcluster.runtime.partition.placed import Placed
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    SUM,
    ByOwner,
    HandleOf,
    ListOf,
    Partial,
    Placement,
    Shape,
    Shard,
    at_home,
    is_whole,
    joined,
)
from tfcluster.runtime.partition.rules import lists as list_rules
from tfcluster.runtime.partition.rules import random as random_rules
from tfcluster.runtime.partition.rules import tables as table_rules
from tfcluster.runtime.partition.rules.all import RULES
from tfcluster.runtime.partition.rules.table import LocalPlan, PlacedOp
from tfcluster.runtime.partition.variable_placements import VariableShards

_READS = frozenset(
    (
        *("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"),
        *("VarIsInitializedOp", "VarHandleOp", "Placeholder"),
        *("LookupTableFindV2", "LookupTableSizeV2", "HashTableV2"),
    )
)
"""Ops that TensorFlow calls stateful, but that need not run if nobody reads them."""
_MOST_ROUNDS = 16


def propagate(
    graph: OpGraph,
    inputs: Sequence[Placement],
    rows: int | None,
    variables: VariableShards = MappingProxyType({}),
    table_rows: frozenset[int] = frozenset(),
) -> Placed:
    """Placements for a graph whose inputs have the placements ``inputs``.

    ``rows`` is the number of rows of the batch. Tensors that have as many rows as a
    divided variable, or ``table_rows``, are divided, too.

    Of ``variables`` a rank holds a piece where all that uses them agrees with it; they
    are among the inputs.
    """
    table_rows |= table_rules.rows_of(inputs)
    while True:
        given = [
            HandleOf(variables[value]) if value in variables else placement
            for value, placement in zip(graph.inputs, inputs, strict=True)
        ]
        shards = variable_placements.by_shape(graph, variables)
        placed = _Propagation(graph, given, rows, {}, shards, table_rows).result()
        disagreeing = variable_placements.disagreeing(placed, variables)
        if not disagreeing:
            return placed
        variables = {v: s for v, s in variables.items() if v not in disagreeing}


_PlacedBodies: TypeAlias = dict[
    tuple[OpGraph, tuple[Placement, ...], int | None], "Placed"
]
"""The bodies of loops and branches for which placements have been found."""


class _Propagation:
    def __init__(
        self,
        graph: OpGraph,
        inputs: Sequence[Placement],
        rows: int | None,
        placed_bodies: _PlacedBodies,
        shards: Mapping[Shape, Shard],
        table_rows: frozenset[int],
    ) -> None:
        self._placed_bodies = placed_bodies
        if graph.taken:
            rows = next(iter(graph.taken.values()))
        self._placed = Placed(
            *(graph, needed(graph), list(inputs), rows),
            shards=shards,
            table_rows=table_rows,
        )
        self._rounds: dict[Value, int] = {}
        """How many exchanges, one after another, must end before a value is there."""

    def result(self) -> Placed:
        placed = self._placed
        self._settle()
        if moments.join(placed.graph, placed.placements):
            placed.nodes = needed(placed.graph)
            for key in [key for key in self._placed_bodies if key[0] is placed.graph]:
                del self._placed_bodies[key]
            self._settle()
        return placed

    def _settle(self) -> None:
        placed = self._placed
        placed.placements = dict(zip(placed.graph.inputs, placed.inputs, strict=True))
        placed.plans, placed.bodies, placed.whole = {}, {}, set()
        self._rounds = dict.fromkeys(placed.graph.inputs, 0)
        more: set[Value] = set()
        for _ in range(_MOST_ROUNDS):
            self._pass(more)
            more = self._to_reduce() - set(placed.reduced)
            if not more:
                break
            placed.reduced.update((value, self._reduced_to(value)) for value in more)

    def _pass(self, changed: set[Value]) -> None:
        """Find plans for the nodes that have none, or that use a changed value."""
        placed = self._placed
        for node in placed.nodes:
            if node in placed.plans and changed.isdisjoint(node.inputs):
                continue
            placed.whole.discard(node)
            plan = placed.plans[node] = self._plan(node)
            rounds = self._rounds_of(node)
            for value, placement in zip(node.outputs, plan.outputs, strict=True):
                before = placed.placements.get(value), self._rounds.get(value)
                if before != (placement, rounds):
                    placed.placements[value], self._rounds[value] = placement, rounds
                    changed.add(value)

    def _seen(self, value: Value) -> Placement:
        """The placement as the nodes that use the value see it."""
        placement = at_home(self._placed.placements[value])
        if isinstance(placement, Partial):
            return self._placed.reduced.get(value, placement)
        return placement

    def _rounds_seen(self, value: Value) -> int:
        """The exchanges before the value has the placement that ``_seen`` returns."""
        return self._rounds[value] + (
            self._seen(value) != self._placed.placements[value]
        )

    def _rounds_of(self, node: Node) -> int:
        """The exchanges that must end before the node has run."""
        if node.is_folded:
            return 0
        wants = zip(node.inputs, self._placed.plans[node].want, strict=True)
        placements = self._placed.placements
        before = [
            self._rounds[value] + _is_exchanged(placements[value], want)
            for value, want in wants
        ]
        own = any(body.exchanges() for body in self._placed.bodies.get(node, ()))
        return max(before, default=0) + own

    def _reduced_to(self, value: Value) -> Placement:
        """What a sum of terms becomes: a piece, if there is a variable to update by it.

        An optimizer uses gradients of the shape of its variables. Who needs all of such
        a sum gathers it from the pieces, which takes no more than an all-reduce.
        """
        if self._placed.placements[value] != SUM:
            return REPLICATE
        shape = value.shape
        return REPLICATE if shape is None else self._placed.shards.get(shape, REPLICATE)

    def _to_reduce(self) -> set[Value]:
        """The Partial values whose terms alone are of no use for a node."""
        placed = self._placed
        return {
            self._source(value)
            for node, plan in placed.plans.items()
            for value, want in zip(node.inputs, plan.want, strict=not node.is_folded)
            if isinstance(placed.placements[value], Partial)
            and not isinstance(want, Partial)
        }

    def _source(self, value: Value) -> Value:
        """The value of which this one is a copy, perhaps of another shape or sign.

        If that is reduced instead, all its copies are whole.
        """
        while (source := self._copied(value.node)) is not None:
            value = source
        return value

    def _copied(self, node: Node) -> Value | None:
        if not node.inputs or node.bodies or node.is_folded:
            return None
        source, *others = node.inputs
        plan = self._placed.plans[node]
        is_copy = (
            len(node.outputs) == 1
            and isinstance(plan.outputs[0], Partial)
            and list(plan.want[:1]) == list(plan.outputs)
            and isinstance(self._placed.placements[source], Partial)
            and all(other.node.is_folded for other in others)
            and source.dtype == node.outputs[0].dtype
            and source.elements == node.outputs[0].elements
        )
        return source if is_copy else None

    def _plan(self, node: Node) -> LocalPlan:
        if node.bodies:
            return self._loop(node) if node.type in LOOPS else self._branch(node)
        if node.is_folded:
            return LocalPlan([], [REPLICATE] * len(node.outputs))
        placements = [self._seen(value) for value in node.inputs]
        taken = self._placed.graph.taken
        if any(value in taken for value in node.outputs):
            rows = [taken.get(value) for value in node.outputs]
            outputs: list[Placement] = [Shard(0, n) if n else REPLICATE for n in rows]
            return LocalPlan(placements, outputs, built=[REPLICATE] * len(outputs))
        # Even if nothing is divided yet, random numbers for the rows can be.
        plan = (
            random_rules.by_rows(node, self._placed.rows)
            or table_rules.plan_of(
                node, placements, self._placed.table_rows, self._placed.rows
            )
            or moments.plan_of(node, placements)
        )
        if plan is not None:
            return plan
        if all(map(is_whole, placements)) and not list_rules.handles_lists(node):
            return LocalPlan(placements, [REPLICATE] * len(node.outputs))
        if (rule := RULES.get(node.type)) is not None:
            rounds = [self._rounds_seen(value) for value in node.inputs]
            plan = rule(PlacedOp(node, placements, rounds))
            if plan is not None and _is_possible(node, placements, plan):
                return plan
        # There is no way to put a handle together.
        if any(isinstance(placement, HandleOf) for placement in placements):
            raise NotImplementedError(
                f"{node.type} has no rule for a table that is divided by rows"
            )
        divides = bool(self._placed.shards)
        gathers = divides and variable_placements.is_assignment(node)
        if not all(map(is_whole, placements)) and not gathers:
            self._placed.whole.add(node)
        return LocalPlan(
            [
                ListOf(REPLICATE) if isinstance(placement, ListOf) else REPLICATE
                for placement in placements
            ],
            [
                ListOf(REPLICATE) if value.list is not None else REPLICATE
                for value in node.outputs
            ],
        )

    # --- loops and branches -----------------------------------------------------------

    def _within(
        self, body: OpGraph, inputs: Sequence[Placement], rows: int | None
    ) -> Placed:
        placed, key = self._placed_bodies, (body, tuple(inputs), rows)
        if key not in placed:
            own = self._placed
            placed[key] = _Propagation(
                body, inputs, rows, placed, own.shards, own.table_rows
            ).result()
        return placed[key]

    def _loop(self, node: Node) -> LocalPlan:
        condition, body = node.bodies
        current = [_carried(self._seen(value)) for value in node.inputs]
        final = [False] * len(current)
        carried = list(
            zip(
                *(node.inputs, node.outputs, condition.inputs, body.inputs),
                body.outputs,
                strict=True,
            )
        )

        def settle() -> None:
            for index, values in enumerate(carried):
                if not all(can_have(value, current[index]) for value in values):
                    current[index], final[index] = _all_whole(current[index]), True

        settle()
        rows = self._placed.rows
        for _ in range(_MOST_ROUNDS):
            placed = self._within(body, current, rows)
            before = list(current)
            for index, placement in enumerate(placed.outputs):
                if not final[index]:
                    current[index], final[index] = joined(current[index], placement)
            settle()
            if before == current:
                break
        else:
            current = [_all_whole(placement) for placement in current]
            placed = self._within(body, current, rows)
        self._placed.bodies[node] = (self._within(condition, current, rows), placed)
        return LocalPlan(current, current)

    def _branch(self, node: Node) -> LocalPlan:
        inputs = [_carried(self._seen(value)) for value in node.inputs[1:]]
        for index, value in enumerate(node.inputs[1:]):
            within = [body.inputs[index] for body in node.bodies]
            if not all(can_have(v, inputs[index]) for v in (value, *within)):
                inputs[index] = _all_whole(inputs[index])
        bodies = [self._of_branch(body, inputs) for body in node.bodies]
        outputs, *others = (body.outputs for body in bodies)
        for other in others:
            outputs = [joined(*pair)[0] for pair in zip(outputs, other, strict=True)]
        results = zip(
            node.outputs, *(body.outputs for body in node.bodies), strict=True
        )
        for index, values in enumerate(results):
            if not all(can_have(value, outputs[index]) for value in values):
                outputs[index] = _all_whole(outputs[index])
        self._placed.bodies[node] = tuple(bodies)
        return LocalPlan([REPLICATE, *inputs], outputs)

    def _of_branch(self, body: OpGraph, inputs: Sequence[Placement]) -> Placed:
        if not body.rows:
            return self._within(body, inputs, self._placed.rows)
        # A branch for batches of a known size: whole outside, divided within.
        sizes = {(body.inputs[index].shape or (None,))[0] for index in body.rows}
        (rows,) = sizes
        if rows is None:
            raise NotImplementedError("a branch for batches of unknown sizes")
        divided: list[Placement] = [
            Shard(0, rows) if index in body.rows else placement
            for index, placement in enumerate(inputs)
        ]
        return self._within(body, divided, rows)


def _is_exchanged(placement: Placement, want: Placement) -> bool:
    """Whether ranks exchange a value to give it the placement that a node wants."""
    if isinstance(placement, Partial | ByOwner) or isinstance(want, ByOwner):
        return want != placement
    return want == REPLICATE != placement


def _is_possible(node: Node, placements: Sequence[Placement], plan: LocalPlan) -> bool:
    """Whether values of these shapes can have the placements that a rule claims."""
    for placement, want in zip(placements, plan.want, strict=True):
        if isinstance(placement, HandleOf) and placement != want:
            return False
    return all(map(can_have, node.inputs, plan.want)) and all(
        map(can_have, node.outputs, plan.outputs)
    )


def can_have(value: Value, placement: Placement) -> bool:
    """Whether a value can be divided so, and put together again."""
    if isinstance(placement, Shard):
        return placement.fits(value.shape)
    if isinstance(placement, ListOf) and isinstance(placement.element, Shard):
        list_type = value.list
        if list_type is None or not list_type.begun:
            return list_type is not None
        shape = list_type.shape
        return elements_of(shape) is not None and placement.element.fits(shape)
    return True


def _carried(placement: Placement) -> Placement:
    """The placement with which a value goes into a loop or a branch."""
    if isinstance(placement, Partial) and placement != SUM:
        return REPLICATE
    return placement


def _all_whole(placement: Placement) -> Placement:
    if isinstance(placement, HandleOf):
        return placement
    return ListOf(REPLICATE) if isinstance(placement, ListOf) else REPLICATE


def needed(graph: OpGraph) -> list[Node]:
    """The nodes on which an output or an effect depends, in their order."""
    needed_nodes = {value.node for value in graph.outputs}
    for node in reversed(graph.nodes):
        if node in needed_nodes or has_effect(node):
            needed_nodes.add(node)
            if not node.is_folded:
                needed_nodes.update(value.node for value in node.inputs)
            needed_nodes.update(node.controls)
    return [node for node in graph.nodes if node in needed_nodes]


def has_effect(node: Node) -> bool:
    """Whether the node has to run even if no output depends on it."""
    if node.type in _READS or random_rules.is_stateful_draw(node):
        return False
    if node.bodies:
        return any(has_effect(inner) for body in node.bodies for inner in body.nodes)
    return node.stateful
