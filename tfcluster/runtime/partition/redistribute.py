"""Gives tensors other placements: each rank's rows of a whole, or a whole by exchange.

All tensors that are needed whole before anything else can be computed go into one
exchange. Exchanges have a fixed order, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective.shard_sums import added_up
from tfcluster.runtime.partition.exchange import (
    BUCKET_BYTES,
    Exchanger,
    ExchangeRequest,
)
from tfcluster.runtime.partition.graph import Value
from tfcluster.runtime.partition.own_rows import OwnRows
from tfcluster.runtime.partition.placed import Placed
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    ByOwner,
    ListOf,
    Partial,
    Placement,
    Ranks,
    Replicate,
    Shape,
    Shard,
    Split,
)
from tfcluster.runtime.partition.writer import OpWriter, Ref
from tfcluster.runtime.tensor_types import DType

_HALVES = (tf.float16, tf.bfloat16)
_FEW = 8
"""An exchange has at least this fraction of a bucket, unless it is the last."""

Refs = tuple[Ref, ...]
"""One for each of the process's ranks, or a single one for a whole tensor."""
Pending = dict[Value, dict[Placement, None]]
"""The values that take an exchange, and the placements in which they are needed."""
_Move = tuple[Value, Placement]
"""A value to be exchanged, and what the ranks have of it then."""


@dataclass(slots=True)
class Traffic:
    """What a function exchanges, and by whom."""

    exchanger: Exchanger | None
    values: list[Sequence[Value]] = field(default_factory=list)
    """The values of each exchange; those of loops and branches are among them."""


class Redistribution:
    """The tensors of a graph's values, with all placements in which they are needed."""

    def __init__(
        self, writer: OpWriter, placed: Placed, ranks: Ranks, traffic: Traffic
    ) -> None:
        self._writer = writer
        self._placed = placed
        self._ranks = ranks
        self._splits = ranks.splits
        self._traffic = traffic
        self._forms: dict[Value, dict[Placement, Refs]] = {}
        self._routes: dict[ByOwner, Refs] = {}
        """By the placements of indices: what came of sending these to their owners."""
        self._order = {node: i for i, node in enumerate(placed.nodes)}
        self.last_exchange = ""
        """The name of the node that ends the last exchange."""
        self.effects: list[str] = []
        """Nodes with effects that were written since whole values were gathered."""

    def __contains__(self, value: Value) -> bool:
        return value in self._forms

    def put(self, value: Value, placement: Placement, refs: Refs) -> None:
        """Note the tensors of a value."""
        self._forms[value] = {placement: refs}

    def get(self, value: Value, want: Placement, pending: Pending) -> Refs | None:
        """A value's refs with the placement wanted.

        None if that takes an exchange, for which the value is added to ``pending``.
        """
        refs = self._form(value, want, pending)
        count = 1 if is_single(want) else len(self._splits)
        if refs is not None and len(refs) < count:
            return refs * count
        return refs

    def _form(self, value: Value, want: Placement, pending: Pending) -> Refs | None:
        forms = self._forms[value]
        form = forms.get(want)
        if form is not None:
            return form
        if isinstance(want, ByOwner):
            self._ask_owners(value, want, pending)
            return None
        if isinstance(want, ListOf) or isinstance(
            self._placed.placements.get(value), ListOf
        ):
            wanted = want if isinstance(want, ListOf) else ListOf(REPLICATE)
            return self._list(value, wanted, pending)
        whole = forms.get(REPLICATE)
        if whole is None:
            pending.setdefault(value, {})[want] = None
            return None
        refs = tuple(self._part(whole[0], value, want))
        forms[want] = refs
        return refs

    def _ask_owners(self, value: Value, want: ByOwner, pending: Pending) -> None:
        """Ask for entries, which go from home to their owners after the indices."""
        is_at_home = self._form(value, want.home, pending) is not None
        if is_at_home and (value is want.ids or want in self._routes):
            pending.setdefault(value, {})[want] = None

    def _part(self, whole: Ref, value: Value, want: Placement) -> Iterator[Ref]:
        exchanger = self._traffic.exchanger
        for split in self._splits:
            if isinstance(want, Shard):
                yield self._rows(whole, value.shape, want, split)
            elif want == Partial("sum") and isinstance(exchanger, OwnRows):
                yield exchanger.term(self._writer, whole, self._placed.rows)
            elif want == Partial("sum") and split.rank:
                yield self._writer.op("ZerosLike", [whole], {})[0]
            else:
                yield whole

    def _rows(self, whole: Ref, shape: Shape | None, want: Shard, split: Split) -> Ref:
        """The rows of a rank."""
        assert shape is not None
        rank = len(shape)
        first, count = split.first(want.rows), split.count(want.rows)
        if want.outer == 1:
            begin, size = [0] * rank, [-1] * rank
            begin[want.dim], size[want.dim] = first * want.inner, count * want.inner
            return self._slice(whole, begin, size)
        blocks = (*shape[: want.dim], want.outer, want.block, *shape[want.dim + 1 :])
        reshaped = self._reshape(whole, blocks)
        begin, size = [0] * (rank + 1), [-1] * (rank + 1)
        begin[want.dim + 1], size[want.dim + 1] = (
            first * want.inner,
            count * want.inner,
        )
        part = self._slice(reshaped, begin, size)
        return self._reshape(part, split.local_shape(shape, want))

    def _slice(self, ref: Ref, begin: Sequence[int], size: Sequence[int]) -> Ref:
        write = self._writer
        bounds = [write.constant(np.array(v, np.int32)) for v in (begin, size)]
        return write.op("Slice", [ref, *bounds], {})[0]

    def _reshape(self, ref: Ref, shape: Shape) -> Ref:
        unknown = [i for i, size in enumerate(shape) if size is None]
        if len(unknown) > 1:
            raise NotImplementedError("a tensor with rows has two unknown sizes")
        sizes = np.array([-1 if size is None else size for size in shape], np.int32)
        return self._writer.op("Reshape", [ref, self._writer.constant(sizes)], {})[0]

    def _list(self, value: Value, want: ListOf, pending: Pending) -> Refs | None:
        """A TensorList whose elements have another placement."""
        forms = self._forms[value]
        have = self._placed.placements[value]
        if not isinstance(have, ListOf):
            have = next(iter(forms))
        if not isinstance(have, ListOf):
            # A list that was made whole.
            have = ListOf(REPLICATE)
            forms[have] = next(iter(forms.values()))
        if want.element is None or have.element is None or have == want:
            return forms[have]
        whole = forms.get(ListOf(REPLICATE))
        if isinstance(have.element, Shard) and whole is None:
            pending.setdefault(value, {})[want] = None
            return None
        assert whole is not None
        if want.element == REPLICATE:
            return whole
        assert isinstance(want.element, Shard)
        assert value.list is not None
        shape = value.list.shape
        if shape is None:
            raise NotImplementedError("a list of elements of unknown shape")
        stacked = self._stacked(whole[0], shape, value)
        rows = want.element.at(want.element.dim + 1)
        parts = [
            self._from_tensor(self._rows(stacked, (None, *shape), rows, split))
            for split in self._splits
        ]
        forms[want] = tuple(parts)
        return forms[want]

    def _stacked(self, handle: Ref, element: Shape, value: Value) -> Ref:
        assert value.list is not None
        sizes = np.array([-1 if s is None else s for s in element], np.int32)
        return self._writer.op(
            "TensorListStack",
            [handle, self._writer.constant(sizes.reshape(-1))],
            {"element_dtype": value.list.dtype},
        )[0]

    def _from_tensor(self, ref: Ref) -> Ref:
        unknown = self._writer.constant(np.array(-1, np.int32))
        return self._writer.op("TensorListFromTensor", [ref, unknown], {})[0]

    # --- exchanges --------------------------------------------------------------------

    def exchange(self, pending: Pending) -> None:
        """Make these values whole on every rank, or give each its piece of a sum.

        Of such a sum, ``get`` may still need another exchange to make it whole, and so
        do the last of many values. Entries that are needed by their owners go there, or
        back.
        """
        reductions: list[_Move] = []
        gathers: list[_Move] = []
        for value, wants in pending.items():
            at_owners = [want for want in wants if isinstance(want, ByOwner)]
            gathers += ((value, want) for want in at_owners)
            if len(at_owners) < len(wants):
                held = self._held(value)
                kind = reductions if isinstance(held, Partial) else gathers
                kind.append((value, self._result(value, held)))
        reductions.sort(key=lambda move: self._order.get(move[0].node, 0))
        exchanger = self._traffic.exchanger
        limit = BUCKET_BYTES if exchanger is None else exchanger.bucket_bytes
        if self._placed.shards and gathers:
            # What weights are assigned: as large as the gradients. Once they are, the
            # memory of their last values is there for those that follow.
            bucket = next(iter(_buckets(gathers, [], limit)))
            with self._writer.after(self.effects):
                self._exchange_bucket(bucket)
            gathers, self.effects = [], []
        for bucket in _buckets(reductions, gathers, limit):
            self._exchange_bucket(bucket)

    def _held(self, value: Value) -> Placement:
        """What ranks have of a value that they exchange: terms, rows or pieces."""
        placement = self._placed.placements[value]
        if isinstance(placement, ByOwner) and placement.home in self._forms[value]:
            return placement.home
        if placement in self._forms[value]:
            pieces = self._placed.reduced.get(value)
            return pieces if pieces in self._forms[value] else placement
        return placement

    def _result(self, value: Value, held: Placement) -> Replicate | Shard:
        """What they have of it then."""
        if isinstance(held, ByOwner):
            return held.home
        target = self._placed.reduced.get(value)
        exchanger = self._traffic.exchanger
        scatters = exchanger is not None and exchanger.scatters
        if scatters and isinstance(held, Partial) and isinstance(target, Shard):
            return target
        return REPLICATE

    def _exchange_bucket(self, moves: Sequence[_Move]) -> None:
        self._traffic.values.append([value for value, _ in moves])
        if not self._ranks.exchanges:
            moves = [move for move in moves if not self._routed_here(*move)]
        requests = []
        for value, result in moves:
            placement: Placement = self._held(value)
            if isinstance(result, ByOwner):
                placement = result.home
            shape = value.shape
            refs = self._forms[value].get(placement)
            if isinstance(placement, ListOf):
                assert refs is not None
                assert value.list is not None
                assert value.list.shape is not None
                assert isinstance(placement.element, Shard)
                element, shape = placement.element, (None, *value.list.shape)
                splits = self._splits
                refs = tuple(
                    self._stacked(ref, split.local_shape(shape[1:], element), value)
                    for ref, split in zip(refs, splits, strict=True)
                )
                placement = element.at(element.dim + 1)
            assert refs is not None
            assert isinstance(placement, Partial | Shard | ByOwner)
            assert isinstance(result, Replicate | Shard | ByOwner)
            ref, *others = self._combined(refs, placement, shape)
            name, rows = value.node.name, self._placed.rows
            requests.append(
                ExchangeRequest(
                    *(ref, placement, shape, name, rows, tuple(others), result),
                    ids=self._ids_of(value, placement, result),
                )
            )
        results = [request.ref for request in requests]
        if self._ranks.exchanges:
            assert self._traffic.exchanger is not None
            with self._writer.after([self.last_exchange]):
                results = self._traffic.exchanger.write(self._writer, requests)
            self.last_exchange = self._writer.last
            # The shapes that the host's function does not give.
            results = [
                self._writer.ensure_shape(ref, self._local_shape(request))
                for ref, request in zip(results, requests, strict=True)
            ]
        results = [
            self._cast(ref, value.dtype)
            if isinstance(request.placement, Partial)
            else ref
            for ref, request, (value, _) in zip(results, requests, moves, strict=True)
        ]
        for (value, _), ref, request in zip(moves, results, requests, strict=True):
            if isinstance(request.result, ByOwner) and value is request.result.ids:
                own, _ = self._writer.op("Unpack", [ref], {"num": 2, "axis": 0})
                self._forms[value][request.result] = (own,)
                self._routes[request.result] = (ref,)
            elif isinstance(self._placed.placements[value], ListOf):
                self._forms[value][ListOf(REPLICATE)] = (self._from_tensor(ref),)
            else:
                self._forms[value][request.result] = (ref,)

    def _ids_of(
        self, value: Value, held: Placement, result: Placement
    ) -> tuple[Ref, ...]:
        """See ``ExchangeRequest.ids``."""
        placement = held if isinstance(held, ByOwner) else result
        if not isinstance(placement, ByOwner):
            return ()
        own = self._forms[placement.ids][placement.home]
        return own if value is placement.ids else (*own, *self._routes[placement])

    def _routed_here(self, value: Value, result: Placement) -> bool:
        """Do what an exchange of entries does, if this process has all ranks.

        Returns whether the value is exchanged so.
        """
        write, held = self._writer, self._held(value)
        forms, axis = self._forms[value], write.constant(np.array(0, np.int32))
        if isinstance(held, ByOwner):
            places, rows = self._routes[held], forms[held]
            whole = write.op("DynamicStitch", [places, rows], {})[0]
            assert value.shape is not None
            forms[REPLICATE] = (self._reshape(whole, value.shape),)
            return True
        if not isinstance(result, ByOwner):
            return False
        whole = self._joined(forms[result.home], result.home, value.shape)
        if value is result.ids:
            whole = self._reshape(whole, (None,))
            self._routes[result] = tuple(
                self._places(whole, result.rows, split) for split in self._splits
            )
        forms[result] = tuple(
            write.op("GatherV2", [whole, places, axis], {})[0]
            for places in self._routes[result]
        )
        return True

    def _places(self, ids: Ref, rows: int, split: Split) -> Ref:
        """The places of a rank's indices among all of them."""
        write, limits = self._writer, np.iinfo(ids.dtype.as_numpy_dtype)
        is_first, is_last = split.rank == 0, split.rank == split.size - 1
        first = limits.min if is_first else split.first(rows)
        end = limits.max if is_last else split.first(rows) + split.count(rows)
        bounds = [write.constant(np.array(n, limits.dtype)) for n in (first, end)]
        conditions = [
            *write.op("GreaterEqual", [ids, bounds[0]], {}),
            *write.op("Less", [ids, bounds[1]], {}),
        ]
        is_own = write.op("LogicalAnd", conditions, {})
        places = write.op(
            "Squeeze", write.op("Where", is_own, {}), {"squeeze_dims": [1]}
        )
        return self._cast(places[0], tf.int32)

    def _local_shape(self, request: ExchangeRequest) -> Shape | None:
        if request.shape is None or isinstance(request.result, ByOwner):
            return None
        return self._splits[0].local_shape(request.shape, request.result)

    def _cast(self, ref: Ref, dtype: DType) -> Ref:
        if ref.dtype == dtype:
            return ref
        return self._writer.op("Cast", [ref], {"DstT": dtype})[0]

    def _combined(
        self, refs: Refs, placement: Partial | Shard | ByOwner, shape: Shape | None
    ) -> list[Ref]:
        """What all of this process's ranks have: rows, or the terms of its subtrees."""
        if isinstance(placement, Partial):
            return self._terms(refs, placement)
        if isinstance(placement, ByOwner):
            return list(refs)
        return [self._joined(refs, placement, shape)]

    def _terms(self, refs: Refs, placement: Partial) -> list[Ref]:
        ranks, write = self._ranks, self._writer
        op = {"sum": "AddV2", "max": "Maximum", "min": "Minimum"}[placement.op]
        if refs[0].dtype == tf.bool:
            op = {"max": "LogicalOr", "min": "LogicalAnd"}[placement.op]
        if ranks.ordered and refs[0].dtype in _HALVES and placement.op == "sum":
            # Not to round each of the sums.
            refs = tuple(self._cast(ref, tf.float32) for ref in refs)
        leaves = {
            (rank, rank + 1): ref for rank, ref in zip(ranks.local, refs, strict=True)
        }
        return [
            added_up(node, leaves, lambda one, two: write.op(op, [one, two], {})[0])
            for node in ranks.nodes
        ]

    def _joined(self, refs: Refs, placement: Shard, shape: Shape | None) -> Ref:
        write, splits, ranks = self._writer, self._splits, self._ranks
        if ranks.ordered and placement.outer > 1 and (shape or ()).count(None) > 1:
            # Whether it can be written must not depend on who has which rank.
            raise NotImplementedError("a tensor with rows has two unknown sizes")
        if len(refs) == 1:
            return refs[0]
        assert shape is not None
        axis = placement.dim
        parts = list(refs)
        if placement.outer > 1:
            axis += 1
            parts = [
                self._reshape(
                    ref,
                    (
                        *shape[: placement.dim],
                        placement.outer,
                        split.local_block(placement),
                        *shape[placement.dim + 1 :],
                    ),
                )
                for ref, split in zip(parts, splits, strict=True)
            ]
        where = write.constant(np.array(axis, np.int32))
        joined = write.op("ConcatV2", [parts, where], {})[0]
        if placement.outer > 1:
            size = sum(split.local_size(placement) for split in splits)
            joined = self._reshape(
                joined, (*shape[: placement.dim], size, *shape[placement.dim + 1 :])
            )
        return joined


def is_single(placement: Placement) -> bool:
    """Whether one tensor serves all ranks of a process."""
    if isinstance(placement, ListOf):
        return not isinstance(placement.element, Shard)
    return isinstance(placement, Replicate)  # Each rank has a handle of its own.


def _buckets(
    reductions: Sequence[_Move], gathers: Sequence[_Move], limit: int
) -> Iterable[Sequence[_Move]]:
    """What goes in each exchange.

    Few bytes wait for a large tensor, since ranks wait for each other in each exchange.
    """
    bucket: list[_Move] = list(gathers)
    nbytes = sum(value.nbytes for value, _ in gathers)
    for move in reductions:
        if nbytes > limit // _FEW and nbytes + move[0].nbytes > limit:
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(move)
        nbytes += move[0].nbytes
    if bucket:
        yield bucket
