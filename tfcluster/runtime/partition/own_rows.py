"""Programs of ranks that train on their own rows, and what these programs change.

With local SGD, ranks train on their own rows, without an exchange in a step. The
program of a rank is the same as if batches were divided. But where ranks would
exchange, a rank takes what it would get if the rows of the others were like its own: a
sum over its rows, times the number of all rows by its own. So everything that the
traced function knows about the size of the batch stays right.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfcluster.runtime.partition.exchange import BUCKET_BYTES, ExchangeRequest
from tfcluster.runtime.partition.functions import LOOPS
from tfcluster.runtime.partition.graph import Value
from tfcluster.runtime.partition.placed import Placed
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    Partial,
    Placement,
    Shard,
    Split,
)
from tfcluster.runtime.partition.writer import OpWriter, Ref


class OwnRows:
    """The ``Exchanger`` of a rank that exchanges nothing."""

    words = ()
    scatters = False
    bucket_bytes = BUCKET_BYTES

    def __init__(self, split: Split) -> None:
        self._split = split

    def write(self, writer: OpWriter, requests: Sequence[ExchangeRequest]) -> list[Ref]:
        """See ``Exchanger``; sums are scaled, and rows repeated."""
        return [self._whole(writer, request) for request in requests]

    def term(self, writer: OpWriter, whole: Ref, rows: int | None) -> Ref:
        """This rank's term of a sum over all ranks that is ``whole``."""
        rows, own = self._counts(rows)
        return _times(writer, whole, own, rows)

    def _whole(self, writer: OpWriter, request: ExchangeRequest) -> Ref:
        placement = request.placement
        if isinstance(placement, Shard):
            return self._repeated(writer, request.ref, placement)
        assert isinstance(placement, Partial)
        if placement.op != "sum":
            return request.ref
        rows, own = self._counts(request.rows)
        return _times(writer, request.ref, rows, own)

    def _counts(self, rows: int | None) -> tuple[int, int]:
        if rows is None:
            raise NotImplementedError("a sum over an unknown number of rows")
        return rows, self._split.count(rows)

    def _repeated(self, writer: OpWriter, ref: Ref, shard: Shard) -> Ref:
        """A tensor with this rank's rows at their places and at those of all others."""
        own = self._split.count(shard.rows)
        rows = (np.arange(shard.rows) - self._split.first(shard.rows)) % own
        entries = rows[:, None] * shard.inner + np.arange(shard.inner)
        blocks = np.arange(shard.outer)[:, None] * (own * shard.inner)
        places = writer.constant((blocks + entries.reshape(-1)).reshape(-1))
        axis = writer.constant(np.array(shard.dim, np.int32))
        return writer.op("GatherV2", [ref, places, axis], {})[0]


def _times(writer: OpWriter, ref: Ref, above: int, below: int) -> Ref:
    """A tensor times a fraction; integers are rounded."""
    dtype = ref.dtype
    if dtype.is_floating or dtype.is_complex:
        factor = np.array(above / below, dtype.as_numpy_dtype)
        return writer.op("Mul", [ref, writer.constant(factor)], {})[0]
    if above % below == 0:
        factor = np.array(above // below, dtype.as_numpy_dtype)
        return writer.op("Mul", [ref, writer.constant(factor)], {})[0]
    exact = writer.op("Cast", [ref], {"SrcT": dtype, "DstT": tf.float64})[0]
    scaled = writer.op("Mul", [exact, writer.constant(np.array(above / below))], {})[0]
    rounded = writer.op("Round", [scaled], {})[0]
    return writer.op("Cast", [rounded], {"SrcT": tf.float64, "DstT": dtype})[0]


def changes(placed: Placed) -> dict[int, Placement]:
    """What a program assigns to its variables, by the places of their inputs.

    ``Shard``: a part belongs to this rank's rows. ``Partial("max")`` or ``"min"``: it
    is the largest or smallest of all rows. Everything else: it is an estimate.
    """
    assigned: dict[Value, Placement] = {}
    for node in placed.nodes:
        if node.bodies:
            carried = node.inputs if node.type in LOOPS else node.inputs[1:]
            for body in placed.bodies[node]:
                inner = changes(body)
                assigned.update((carried[place], inner[place]) for place in inner)
        elif node.type.startswith(CHANGES):
            kind: Placement = REPLICATE
            if node.type == "AssignVariableOp":
                kind = _kind_of(placed, node.inputs[1])
            assigned.update((v, kind) for v in node.inputs if v.dtype == tf.resource)
    inputs = placed.graph.inputs
    return {i: assigned[value] for i, value in enumerate(inputs) if value in assigned}


def _kind_of(placed: Placed, value: Value) -> Placement:
    kind = placed.placements[value]
    if kind == REPLICATE and value.node.type in _EXTREMES:
        kinds = [placed.placements[operand] for operand in value.node.inputs]
        extreme = Partial(_EXTREMES[value.node.type])
        return extreme if extreme in kinds else kind
    return kind


_EXTREMES = {"Maximum": "max", "Minimum": "min"}
CHANGES = ("Assign", "ResourceApply", "ResourceSparseApply", "ResourceScatter")
"""The beginnings of the ops that change variables."""
