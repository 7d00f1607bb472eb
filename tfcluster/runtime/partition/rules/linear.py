"""Linear ops, which also compute terms of a sum from terms of a sum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfcluster.runtime.partition.graph import Node, Value, elements_of
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    SUM,
    HandleOf,
    ListOf,
    Partial,
    Placement,
    Shard,
)
from tfcluster.runtime.partition.rules.elementwise import elementwise
from tfcluster.runtime.partition.rules.table import (
    LocalOps,
    LocalPlan,
    PlacedOp,
    Whole,
    require,
    rule,
)
from tfcluster.runtime.partition.writer import Ref

_COPIES = ("Identity", "StopGradient", "PreventGradient", "Snapshot")


@rule(*_COPIES)
def copy(op: PlacedOp) -> LocalPlan:
    placement = op.placements[0]
    if isinstance(placement, Partial | ListOf | HandleOf):
        return LocalPlan([placement], [placement])
    return elementwise(op)


@rule("IdentityN")
def copy_all(op: PlacedOp) -> LocalPlan:
    return LocalPlan(list(op.placements), list(op.placements))


@rule("PlaceholderWithDefault")
def default(op: PlacedOp) -> LocalPlan:
    """Nothing else is fed here; its shape may be that of all rows."""
    plan = copy(op)
    return LocalPlan(plan.want, plan.outputs, lambda local, node, inputs: inputs)


@rule("CheckNumerics", "CheckNumericsV2")
def check_numerics(op: PlacedOp) -> LocalPlan:
    """Rows are checked by the rank that has them; a term may be anything."""
    shard = op.shard()
    return LocalPlan([shard], [shard])


@rule("EnsureShape")
def ensure_shape(op: PlacedOp) -> LocalPlan:
    """The number of rows is known; the other sizes are checked."""
    placement, output = op.placements[0], op.output_shape()
    if isinstance(placement, Partial):
        return LocalPlan([placement], [placement])
    shard = op.shard()
    require(output[shard.dim] == shard.size)

    def build(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
        expected = local.split.local_shape(output, shard)
        return local.repeat(node, inputs, shape=tf.TensorShape(expected))

    return LocalPlan([shard], [shard], build)


rule("Conj", "Imag", "Neg", "Real", linear=0)(elementwise)


@rule("Cast")
def cast(op: PlacedOp) -> LocalPlan:
    """Terms are cast only to dtypes that hold them exactly.

    A sum of float16 may overflow although no term does. Optimizers that scale losses
    look for that, and so it must happen on ranks as on one machine.
    """
    source, target = op.inputs[0].dtype, op.outputs[0].dtype
    if op.placements[0] == SUM and source.is_floating and target.is_floating:
        holds = target.size >= source.size and target.size > 2
        if holds and source != tf.float16:
            return LocalPlan([SUM], [SUM])
        raise Whole
    return elementwise(op)


@rule("Add", "AddV2", "Sub", "AddN")
def add(op: PlacedOp) -> LocalPlan:
    """A sum of terms is a term of the sum, if nothing is broadcast.

    Terms are added up over the ranks at once where a whole input waits for an exchange
    in which they can go: their sum with it would need one more.
    """
    placements = op.placements
    if any(isinstance(placement, ListOf) for placement in placements):
        return _add_lists(op)
    if SUM in placements and {SUM, REPLICATE}.issuperset(placements):
        output = op.output_shape()
        same = all(value.shape == output for value in op.inputs)
        same = same and op.outputs[0].dtype != tf.float16  # See ``cast``.
        if same and elements_of(output) is not None:
            placement: Placement = REPLICATE if _waits_for_exchange(op) else SUM
            return LocalPlan([placement] * len(placements), [placement])
    return elementwise(op)


def _waits_for_exchange(op: PlacedOp) -> bool:
    """Whether whole inputs wait for an exchange for which no term waits."""
    rounds = list(zip(op.placements, op.rounds, strict=True))
    terms = max(count for placement, count in rounds if placement == SUM)
    return any(count > terms for placement, count in rounds if placement == REPLICATE)


def _add_lists(op: PlacedOp) -> LocalPlan:
    """Lists of gradients, which are added element by element."""
    element: Placement | None = None
    for placement in op.placements:
        own = placement.element if isinstance(placement, ListOf) else REPLICATE
        if element is None or (element == REPLICATE and isinstance(own, Shard)):
            element = own
        elif own is not None and own != element and own != REPLICATE:
            element = REPLICATE
    lists = ListOf(element if isinstance(element, Shard) else REPLICATE)
    return LocalPlan([lists] * len(op.placements), [lists])


@rule("Mul")
def multiply(op: PlacedOp) -> LocalPlan:
    for term, factor in ((0, 1), (1, 0)):
        if op.placements[term] == SUM and op.placements[factor] == REPLICATE:
            return _scaled(op, term, factor)
    return elementwise(op)


@rule("RealDiv", "DivNoNan", "Div")
def divide(op: PlacedOp) -> LocalPlan:
    if op.placements[0] == SUM and op.placements[1] == REPLICATE:
        return _scaled(op, 0, 1)
    return elementwise(op)


def _scaled(op: PlacedOp, term: int, factor: int) -> LocalPlan:
    """Terms times a factor.

    Only if the factor is finite: 0 * inf is not 0. It is, if it is a constant; any
    other factor is used once the sum is known.
    """
    output = elements_of(op.output_shape())
    if output is None or output != op.elements(term):
        raise Whole
    require(is_finite_constant(op.inputs[factor]))
    divisor = None if op.type == "Mul" else op.constant(factor)
    if divisor is not None and (np.abs(divisor) <= _TINY).any():
        raise Whole
    want: list[Placement] = [REPLICATE, REPLICATE]
    want[term] = SUM
    return LocalPlan(want, [SUM])


def is_finite_constant(factor: Value) -> bool:
    """Whether a factor is known to be finite, so that terms of zero stay zero."""
    if factor.dtype.size < 4 or not factor.dtype.is_floating:
        return False
    elements = elements_of(factor.shape)
    if elements is None or elements >= _LARGE:
        return False
    return factor.constant is not None and bool(np.isfinite(factor.constant).all())


_LARGE = 1024
_TINY = 1e-30
