"""The table of rules, and what a rule sees of an op.

A rule gets an op of the whole graph with the placements that its inputs have, and
returns a ``LocalPlan``: the placements that the op wants, those of its outputs, and how
a rank computes them if not by the same op. It ends where something does not hold that
it requires, or where something is not known that it asks of the op, such as a shape or
the ``Shard`` of an input: the op is then computed whole. To add an op, add its name to
the ``@rule`` of its family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from tfcluster.runtime.partition.graph import Node, Value, elements_of, sizes_of
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    SUM,
    ListOf,
    Placement,
    Shape,
    Shard,
    Split,
)
from tfcluster.runtime.partition.writer import Ref
from tfcluster.runtime.tensor_types import Array


class LocalOps(Protocol):
    """Writes the ops of one rank."""

    @property
    def split(self) -> Split:
        """The rank's rows."""
        ...

    def repeat(
        self, node: Node, inputs: Sequence[Ref], **attributes: object
    ) -> list[Ref]:
        """The same op for other inputs, with some other attributes."""
        ...

    def op(
        self,
        op_type: str,
        inputs: Sequence[Ref | Sequence[Ref]],
        **attributes: object,
    ) -> list[Ref]:
        """An op; dtypes and counts of inputs among its attributes are inferred."""
        ...

    def constant(self, array: Array) -> Ref:
        """A constant."""
        ...


Build: TypeAlias = Callable[[LocalOps, Node, Sequence[Ref]], Sequence[Ref]]
"""Writes a rank's ops for a node, given its inputs as wanted; returns the outputs."""


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """How a rank computes an op."""

    want: Sequence[Placement]
    outputs: Sequence[Placement]
    build: Build | None = None
    """None if the rank repeats the op."""
    built: Sequence[Placement] | None = None
    """What is written, if not ``outputs``: each rank then takes its part of it."""

    @property
    def written(self) -> Sequence[Placement]:
        return self.outputs if self.built is None else self.built


class Whole(Exception):
    """A rule does not cover this use of its op, which is then computed whole."""


T = TypeVar("T")


def known(value: T | None) -> T:
    """``value``, without which the op is computed whole."""
    if value is None:
        raise Whole
    return value


def require(condition: bool) -> None:
    """End the rule unless the condition holds: the op is then computed whole."""
    if not condition:
        raise Whole


class PlacedOp:
    """An op with the placements that its inputs have."""

    __slots__ = ("node", "placements", "rounds")

    def __init__(
        self, node: Node, placements: Sequence[Placement], rounds: Sequence[int] = ()
    ) -> None:
        self.node = node
        self.placements = placements
        self.rounds = rounds or [0] * len(placements)
        """For each input: how many exchanges must end before its placement is there."""

    @property
    def type(self) -> str:
        return self.node.type

    @property
    def inputs(self) -> Sequence[Value]:
        return self.node.inputs

    @property
    def outputs(self) -> Sequence[Value]:
        return self.node.outputs

    def shape(self, index: int = 0) -> Shape:
        """The shape of an input."""
        return known(self.node.inputs[index].shape)

    def output_shape(self, index: int = 0) -> Shape:
        """The shape of an output."""
        return known(self.node.outputs[index].shape)

    def sizes(self, index: int = 0) -> tuple[int, ...]:
        """The shape of an input, all of whose sizes are known."""
        return known(sizes_of(self.shape(index)))

    def output_sizes(self, index: int = 0) -> tuple[int, ...]:
        """The shape of an output, all of whose sizes are known."""
        return known(sizes_of(self.output_shape(index)))

    def elements(self, index: int = 0) -> int | None:
        """The number of elements of an input; None if it is not known."""
        return elements_of(self.node.inputs[index].shape)

    def constant(self, index: int) -> Array:
        """The value of an input that depends on no input of the function."""
        return known(self.node.inputs[index].constant)

    def integer(self, index: int) -> int:
        """The value of an input that has one element, such as an axis."""
        constant = self.constant(index)
        if constant.size != 1:
            raise Whole
        return int(constant.reshape(-1)[0])

    def attribute(self, name: str) -> Any:
        return self.node.attribute(name)

    def shard(self, index: int = 0) -> Shard:
        """The placement of an input that is divided."""
        return self.first_shard([index])

    def first_shard(self, indices: Sequence[int] | None = None) -> Shard:
        """The placement of the first of these inputs, or of all, that is divided."""
        chosen = range(len(self.placements)) if indices is None else indices
        placements = (self.placements[index] for index in chosen)
        return known(next((p for p in placements if isinstance(p, Shard)), None))

    def alike(self, inputs: Sequence[int], before: int | None = None) -> LocalPlan:
        """A plan that divides these inputs, and all outputs, along one dimension.

        It is one of the first ``before`` dimensions. Other inputs are whole.
        """
        shard = self.first_shard(inputs)
        if before is not None and shard.dim >= before:
            raise Whole
        return LocalPlan(self.want(inputs, shard), [shard] * len(self.outputs))

    def added_up(self, want: Sequence[Placement], terms: Placement) -> LocalPlan:
        """A plan by which each rank puts its rows into a term of the result.

        If the result is larger than all rows, the rows are what ranks exchange.
        """
        placed = zip(self.inputs, want, strict=True)
        rows = sum(
            v.elements or 0 for v, placement in placed if isinstance(placement, Shard)
        )
        if rows < (self.outputs[0].elements or 0):
            return LocalPlan([REPLICATE] * len(want), [REPLICATE])
        return LocalPlan(want, [terms])

    def is_list(self, index: int = 0) -> bool:
        return isinstance(self.placements[index], ListOf)

    def want(self, chosen: Sequence[int], placement: Placement) -> list[Placement]:
        """A ``LocalPlan.want``: ``placement`` for chosen inputs, else Replicate."""
        return [
            placement if index in chosen else REPLICATE
            for index in range(len(self.inputs))
        ]


Rule: TypeAlias = Callable[[PlacedOp], LocalPlan]
R = TypeVar("R", bound=Rule)

RULES: dict[str, Callable[[PlacedOp], LocalPlan | None]] = {}
"""The rule of each op that can be divided; None if it has to be computed whole."""
WHOLE: dict[str, str] = {}
"""Why an op is computed whole, for ops of which that is known."""
WHOLE_FAMILIES: dict[str, str] = {}
"""The same for all ops that have no entry and whose names begin so."""


def rule(*op_types: str, linear: int | None = None) -> Callable[[R], R]:
    """Register a function as the rule of these ops.

    With ``linear``, the ops are linear in this input: terms of it become terms of the
    outputs. The function then gets the op with other placements only.
    """

    def register(function: R) -> R:
        for op_type in op_types:
            if op_type in RULES:
                raise ValueError(f"{op_type} has two rules")
            RULES[op_type] = _registered(function, linear)
        return function

    return register


def _registered(
    function: Rule, linear: int | None
) -> Callable[[PlacedOp], LocalPlan | None]:
    def rule(op: PlacedOp) -> LocalPlan | None:
        if linear is not None and op.placements[linear] == SUM:
            return LocalPlan(op.want([linear], SUM), [SUM] * len(op.outputs))
        try:
            return function(op)
        except Whole:
            return None

    return rule


def by_rows(*inputs: int) -> Rule:
    """A rule that divides these inputs, and all outputs, along their dimension 0."""
    return lambda op: op.alike(inputs, 1)


def whole(reason: str, *op_types: str) -> None:
    """Register ops that are computed whole."""
    for op_type in op_types:
        WHOLE[op_type] = reason


def whole_family(reason: str, *prefixes: str) -> None:
    """Register ops that are computed whole by how their names begin."""
    for prefix in prefixes:
        WHOLE_FAMILIES[prefix] = reason


def why_whole(op_type: str) -> str | None:
    """Why an op that has no rule is computed whole; None if nobody has said so."""
    if op_type in WHOLE:
        return WHOLE[op_type]
    reasons = (r for prefix, r in WHOLE_FAMILIES.items() if op_type.startswith(prefix))
    return next(reasons, None)
