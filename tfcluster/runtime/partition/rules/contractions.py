"""Products that sum over a common dimension: matrix products, Einsum."""

from __future__ import annotations

from collections.abc import Sequence

from tfcluster.runtime.partition.graph import elements_of
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    SUM,
    Placement,
    Shard,
)
from tfcluster.runtime.partition.rules.linear import is_finite_constant
from tfcluster.runtime.partition.rules.table import (
    LocalPlan,
    PlacedOp,
    Whole,
    require,
    rule,
)

Labels = Sequence[object]
"""A name for each dimension; None for a dimension of size 1 that is broadcast."""


@rule("MatMul")
def matmul(op: PlacedOp) -> LocalPlan:
    first = "km" if op.attribute("transpose_a") else "mk"
    second = "nk" if op.attribute("transpose_b") else "kn"
    return contract(op, [list(first), list(second)], list("mn"))


@rule("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def batch_matmul(op: PlacedOp) -> LocalPlan:
    output = op.output_shape()

    def labels(index: int, matrix: str) -> list[object]:
        shape = op.shape(index)
        before = len(output) - len(shape)
        batch_labels: list[object] = []
        for dim, size in enumerate(shape[:-2]):
            place = dim + before
            batch_labels.append(None if size == 1 and output[place] != 1 else place)
        return [*batch_labels, *matrix]

    first = labels(0, "km" if op.attribute("adj_x") else "mk")
    second = labels(1, "nk" if op.attribute("adj_y") else "kn")
    return contract(op, [first, second], [*range(len(output) - 2), "m", "n"])


@rule("Einsum")
def einsum(op: PlacedOp) -> LocalPlan:
    equation = op.attribute("equation").decode().replace(" ", "")
    inputs, _, output = equation.partition("->")
    labels = [list(term) for term in inputs.split(",")]
    require(not any(len(set(term)) < len(term) for term in [*labels, output]))
    require("..." not in equation)
    if len(labels) == 2:
        return contract(op, labels, list(output))
    require(len(labels) == 1)
    if op.placements[0] == SUM:
        return LocalPlan([SUM], [SUM])
    shard = op.shard()
    label = labels[0][shard.dim]
    if label in output:
        return LocalPlan([shard], [shard.at(output.index(label))])
    return LocalPlan([shard], [SUM])


def contract(op: PlacedOp, labels: Sequence[Labels], output: Labels) -> LocalPlan:
    """Divide both inputs along the dimension of one of them that is divided.

    If the output does not have that dimension, the result is a term of a sum. Of
    several ways the one is taken that moves the fewest elements.
    """
    plans = []
    for index in (0, 1):
        shard = op.placements[index]
        if not isinstance(shard, Shard):
            continue
        label = labels[index][shard.dim]
        if label is None:
            continue
        plan = _along(op, labels, output, label, shard)
        if plan is not None:
            plans.append(plan)
    if plans:
        return min(plans, key=lambda plan: _moved(op, plan))
    return _of_terms(op)


def _along(
    op: PlacedOp,
    labels: Sequence[Labels],
    output: Labels,
    label: object,
    shard: Shard,
) -> LocalPlan | None:
    want: list[Placement] = []
    for index, own in enumerate(labels):
        if label in own:
            dim = list(own).index(label)
            shape = op.shape(index)
            if shape[dim] != shard.size:
                return None
            want.append(shard.at(dim))
        elif label in output:
            want.append(REPLICATE)
        else:
            # The sum over the rows of one input is a factor of the other, which may be
            # infinite: then a term of zero is not zero.
            return None
    if label in output:
        return LocalPlan(want, [shard.at(list(output).index(label))])
    return LocalPlan(want, [SUM])


def _of_terms(op: PlacedOp) -> LocalPlan:
    """Terms times a constant, unless the result is larger than the terms.

    Any other factor may be infinite, which would make a term of zero NaN. It is used
    once the sum is known.
    """
    output = elements_of(op.output_shape())
    for index in (0, 1):
        size = op.elements(index)
        is_term = op.placements[index] == SUM and op.placements[1 - index] == REPLICATE
        if not is_term or output is None or size is None or output > size:
            continue
        if is_finite_constant(op.inputs[1 - index]):
            want: list[Placement] = [REPLICATE, REPLICATE]
            want[index] = SUM
            return LocalPlan(want, [SUM])
    raise Whole


def _moved(op: PlacedOp, plan: LocalPlan) -> int:
    """The number of elements of inputs that have to be exchanged."""
    return sum(
        op.elements(index) or 0
        for index, want in enumerate(plan.want)
        if want != op.placements[index] and op.placements[index] != REPLICATE
    )
