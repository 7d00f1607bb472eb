"""Products of sparse and dense matrices, and losses of sequences with sparse labels.

The entries of a sparse tensor are not divided: only its rows could be, and how many
entries a row has depends on the data. Each rank takes those of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfcluster.runtime.partition.graph import Node
from tfcluster.runtime.partition.placement import REPLICATE, Shard
from tfcluster.runtime.partition.rules.table import (
    LocalOps,
    LocalPlan,
    PlacedOp,
    require,
    rule,
)
from tfcluster.runtime.partition.writer import Ref

_ENDLESS = 1 << 31
"""More than any dimension here has; its square is a number of elements, too."""


@rule("SparseTensorDenseMatMul")
def sparse_matmul(op: PlacedOp) -> LocalPlan:
    """The columns of the dense matrix are divided; or the rows of the result.

    The latter if the dense matrix has the same rows, such as the nodes of a graph.
    """
    shard, output = op.shard(3), op.output_shape()
    columns = 0 if op.attribute("adjoint_b") else 1
    if shard.dim == columns:
        return LocalPlan(op.want([3], shard), [shard.at(1)])
    require(output[0] == shard.size and shard.outer == 1)
    is_adjoint = bool(op.attribute("adjoint_a"))

    def build(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
        entries = _rows(local, inputs[:3], shard, int(is_adjoint))
        return local.repeat(node, [*entries, inputs[3]])

    return LocalPlan([REPLICATE] * 4, [shard.at(0)], build)


def _rows(
    local: LocalOps, entries: Sequence[Ref], shard: Shard, dim: int
) -> Sequence[Ref]:
    """The entries of a sparse matrix at a rank's rows, which are in dimension ``dim``.

    The rows are counted from the rank's first one.
    """
    begin, size = np.zeros(2, np.int64), np.full(2, _ENDLESS)
    begin[dim] = local.split.first(shard.rows) * shard.inner
    size[dim] = local.split.local_size(shard)
    bounds = [local.constant(vector) for vector in (begin, size)]
    return local.op("SparseSlice", [*entries, *bounds])


@rule("CTCLoss", "CTCLossV2")
def ctc_loss(op: PlacedOp) -> LocalPlan:
    """Sequences are in dimension 1 of the first input."""
    has_rows = isinstance(op.placements[0], Shard)
    shard = op.shard(0) if has_rows else op.shard(3).at(1)
    require(shard.dim == 1 and shard.outer == 1)
    rows = shard.at(0)

    def build(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
        shape = local.constant(np.full(2, _ENDLESS))
        labels = _rows(local, [*inputs[1:3], shape], rows, 0)
        return local.repeat(node, [inputs[0], *labels[:2], inputs[3]])

    want = op.want([0], shard)
    want[3] = rows
    return LocalPlan(want, [rows, shard], build)
