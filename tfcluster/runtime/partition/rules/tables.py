"""Variables of which every rank has its rows, such as tables of embeddings.

What is read has the rows in its first dimension, and so has what is computed from it.
Entries that an index names are read and changed by the rank that has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.graph import Node
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    SUM,
    ByOwner,
    HandleOf,
    Placement,
    Shard,
)
from tfcluster.runtime.partition.rules.table import (
    Build,
    LocalOps,
    LocalPlan,
    PlacedOp,
    known,
    require,
    rule,
)
from tfcluster.runtime.partition.writer import Ref


def rows_of(inputs: Sequence[Placement]) -> frozenset[int]:
    """The numbers of rows of the divided variables among a graph's inputs."""
    handles = (p.element.rows for p in inputs if isinstance(p, HandleOf))
    return frozenset(handles)


def plan_of(
    node: Node,
    placements: Sequence[Placement],
    table_rows: frozenset[int],
    rows: int | None = None,
) -> LocalPlan | None:
    """A plan for an op on a table, or for a tensor that is as large as a table.

    Gradients of a table are sums at the rows that were read, and constants may have its
    shape: no rank computes all of it, even if nothing else is divided.
    """
    if not table_rows:
        return None
    if node.type in _LOOKUPS:
        return _lookup(node, placements, table_rows, rows)
    builds: dict[str, Build] = {"UnsortedSegmentSum": _segments, "Fill": _fill}
    shape = node.outputs[0].shape if node.type in builds else None
    if not shape or shape[0] not in table_rows or None in shape:
        return None
    if node.type == "UnsortedSegmentSum" and len(node.inputs[1].shape or ()) != 1:
        return None
    want: list[Placement] = [REPLICATE] * len(node.inputs)
    build = builds[node.type]
    home = _home(placements[1], placements[0])
    if node.type == "UnsortedSegmentSum" and home is not None:
        want[:2] = [ByOwner(node.inputs[1], shape[0], home)] * 2
        build = _own_segments
    return LocalPlan(want, [Shard(0, shape[0])], build)


def _home(ids: Placement, updates: Placement) -> Shard | None:
    """How indices, of one dimension, and updates are divided, if one of them is."""
    shards = (p for p in (ids, updates) if isinstance(p, Shard) and p.dim == 0)
    return next(shards, None)


def _fill(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
    shape = _shape_of(node)
    sizes = local.split.local_shape(shape, Shard(0, shape[0]))
    dtype = inputs[0].dtype.as_numpy_dtype
    return local.op("Fill", [local.constant(np.array(sizes, dtype)), inputs[1]])


def _segments(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
    """Sums of the rank's own segments; what has an index below zero is dropped."""
    values, ids, count = inputs
    own, is_own = _own(local, ids, _shape_of(node)[0])
    if is_own is not None:
        nowhere = local.constant(np.array(-1, ids.dtype.as_numpy_dtype))
        own = local.op("SelectV2", [is_own, own, nowhere])[0]
    return _sums(local, node, values, own, count)


def _own_segments(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
    """The same for values that have come to the ranks whose segments they belong to."""
    values, ids, count = inputs
    own = _from_first(local, ids, _shape_of(node)[0])
    return _sums(local, node, values, own, count)


def _sums(
    local: LocalOps, node: Node, values: Ref, ids: Ref, count: Ref
) -> Sequence[Ref]:
    own_count = local.split.count(_shape_of(node)[0])
    counts = local.constant(np.array(own_count, count.dtype.as_numpy_dtype))
    return local.repeat(node, [values, ids, counts])


def _shape_of(node: Node) -> tuple[int, ...]:
    shape = node.outputs[0].shape
    assert shape is not None
    return tuple(size for size in shape if size is not None)


def _from_first(local: LocalOps, ids: Ref, rows: int) -> Ref:
    """Indices counted from the rank's first row."""
    if not local.split.rank:
        return ids
    first = local.split.first(rows)
    return local.op(
        "Sub", [ids, local.constant(np.array(first, ids.dtype.as_numpy_dtype))]
    )[0]


def _own(local: LocalOps, ids: Ref, rows: int) -> tuple[Ref, Ref | None]:
    """Indices counted from the rank's first row, and which of them are its own.

    None: all of them. An index that no rank has belongs to the first rank or the last,
    whose op reports it.
    """
    split, dtype = local.split, ids.dtype.as_numpy_dtype
    own, conditions = _from_first(local, ids, rows), []
    if split.rank > 0:
        zero = local.constant(np.array(0, dtype))
        conditions += local.op("GreaterEqual", [own, zero])
    if split.rank < split.size - 1:
        count = local.constant(np.array(split.count(rows), dtype))
        conditions += local.op("Less", [own, count])
    if len(conditions) == 2:
        conditions = local.op("LogicalAnd", conditions)
    return own, conditions[0] if conditions else None


# --- reads ----------------------------------------------------------------------------


def _lookup(
    node: Node,
    placements: Sequence[Placement],
    table_rows: frozenset[int],
    batch_rows: int | None,
) -> LocalPlan | None:
    """Rows that indices name: ranks look them up for each other.

    If all ranks have all indices, a rank has zeros for rows that it does not have. So
    the result is the sum over the ranks, and exact: all terms but one are zero.
    """
    table, ids = placements[0], node.inputs[1].shape
    output = node.outputs[0].shape
    rows = table.element if isinstance(table, HandleOf) else table
    if not isinstance(rows, Shard) or rows != Shard(0, rows.rows):
        return None
    if rows.rows not in table_rows or ids is None or output is None:
        return None
    if node.attribute("batch_dims") or node.inputs[1].dtype.size < 4:
        return None
    if node.type == "GatherV2":
        axis = node.inputs[2].constant
        if axis is None or int(axis) != 0:
            return None
    want: list[Placement] = [table, *[REPLICATE] * (len(node.inputs) - 1)]
    home = placements[1]
    if batch_rows is not None and home == REPLICATE and ids[:1] == (batch_rows,):
        home = Shard(0, batch_rows)
    if isinstance(home, Shard):
        want[1] = ByOwner(node.inputs[1], rows.rows, home)
        return LocalPlan(want, [want[1]], partial(_look_up_own, rows.rows))
    build = partial(_look_up, rows.rows, len(output) - len(ids))
    return LocalPlan(want, [SUM], build)


_LOOKUPS = ("GatherV2", "ResourceGather")


def _look_up_own(
    rows: int, local: LocalOps, node: Node, inputs: Sequence[Ref]
) -> Sequence[Ref]:
    table, ids, *axis = inputs
    return local.repeat(node, [table, _from_first(local, ids, rows), *axis])


def _look_up(
    rows: int, dims: int, local: LocalOps, node: Node, inputs: Sequence[Ref]
) -> Sequence[Ref]:
    table, ids, *axis = inputs
    own, is_own = _own(local, ids, rows)
    if is_own is None:
        return local.repeat(node, inputs)
    zero = local.constant(np.array(0, ids.dtype.as_numpy_dtype))
    places = local.op("SelectV2", [is_own, own, zero])[0]
    entries = local.repeat(node, [table, places, *axis])[0]
    last = local.constant(np.array(-1, np.int32))
    for _ in range(dims):
        is_own = local.op("ExpandDims", [is_own, last])[0]
    nothing = local.constant(np.zeros((), entries.dtype.as_numpy_dtype))
    return local.op("SelectV2", [is_own, entries, nothing])


@rule("ReadVariableOp")
def read(op: PlacedOp) -> LocalPlan:
    table = _table(op)
    return LocalPlan([table], [table.element])


@rule("VariableShape")
def variable_shape(op: PlacedOp) -> LocalPlan:
    shape = known(op.outputs[0].constant)
    return LocalPlan(
        [_table(op)], [REPLICATE], lambda local, node, inputs: [local.constant(shape)]
    )


@rule("VarIsInitializedOp", "DisableCopyOnRead")
def handle_alone(op: PlacedOp) -> LocalPlan:
    return LocalPlan([_table(op)], [REPLICATE] * len(op.outputs))


def _table(op: PlacedOp, index: int = 0) -> HandleOf:
    placement = op.placements[index]
    require(isinstance(placement, HandleOf))
    assert isinstance(placement, HandleOf)
    return placement


# --- changes --------------------------------------------------------------------------


@rule("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
def assign(op: PlacedOp) -> LocalPlan:
    table = _table(op)
    return LocalPlan([table, table.element], [])


@rule(
    *("ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterUpdate"),
    *("ResourceScatterMul", "ResourceScatterDiv"),
    *("ResourceScatterMin", "ResourceScatterMax"),
    *("ResourceSparseApplyAdadelta", "ResourceSparseApplyAdagrad"),
    *("ResourceSparseApplyAdagradV2", "ResourceSparseApplyFtrl"),
    *("ResourceSparseApplyFtrlV2", "ResourceSparseApplyKerasMomentum"),
    *("ResourceSparseApplyMomentum", "ResourceSparseApplyProximalAdagrad"),
    *("ResourceSparseApplyProximalGradientDescent", "ResourceSparseApplyRMSProp"),
)
def scatter(op: PlacedOp) -> LocalPlan:
    """Each rank applies the updates of its own rows, in their order."""
    names = [
        argument.name for argument in known(tf_functions.op_def(op.type)).input_arg
    ]
    place_of_ids = names.index("indices")
    place_of_updates = names.index("updates" if "updates" in names else "grad")
    table = _table(op)
    require(
        all(
            p == table
            for p, value in zip(op.placements, op.inputs, strict=True)
            if value.is_handle
        )
    )
    ids, updates = op.shape(place_of_ids), op.shape(place_of_updates)
    require(len(ids) == 1)
    home = _home(op.placements[place_of_ids], op.placements[place_of_updates])

    def own(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
        chosen = list(inputs)
        chosen[place_of_ids] = _from_first(
            local, inputs[place_of_ids], table.element.rows
        )
        return local.repeat(node, chosen)

    def build(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
        chosen = list(inputs)
        own, is_own = _own(local, inputs[place_of_ids], table.element.rows)
        chosen[place_of_ids] = own
        if is_own is not None:
            places = local.op("Where", [is_own])[0]
            places = local.op("Squeeze", [places], squeeze_dims=[1])[0]
            axis = local.constant(np.array(0, np.int32))
            chosen[place_of_ids] = local.op("GatherV2", [own, places, axis])[0]
            if updates:
                rows = local.op("GatherV2", [inputs[place_of_updates], places, axis])
                chosen[place_of_updates] = rows[0]
        return local.repeat(node, chosen)

    want: list[Placement] = [
        p if isinstance(p, HandleOf) else REPLICATE for p in op.placements
    ]
    if home is not None:
        routed = ByOwner(op.inputs[place_of_ids], table.element.rows, home)
        want[place_of_ids] = routed
        if updates:
            want[place_of_updates] = routed
    return LocalPlan(want, [], build if home is None else own)
