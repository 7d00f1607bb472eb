"""Exchanges by TensorFlow's collective ops, which need neither Python nor the host.

Terms of sums go through an all-reduce; everything else goes through an all-gather. All
tensors of one dtype travel as one vector. What the ops do not support is left to
another exchanger, in the same program.

The ops of a program run one after the other, as NCCL needs, also within loops. Their
keys are made from the program's name, so they repeat. That is safe: no rank begins an
op before all ranks have ended the one before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective.transports.tensorflow.devices import (
    SUBDIVISIONS,
    DeviceGroup,
    Groups,
    instance_key,
)
from tfcluster.runtime.partition.exchange import Exchanger, ExchangeRequest, words_of
from tfcluster.runtime.partition.placement import Partial, Shard, Split
from tfcluster.runtime.partition.writer import OpWriter, Ref
from tfcluster.runtime.tensor_types import DType

SCOPE = "tfcluster_exchange"
"""The name scope of the ops, by which TensorFlow's error messages are recognised."""

_BITS = {
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.complex64: tf.float32,
    tf.complex128: tf.float64,
}
"""Dtypes that travel as the same bits of other dtypes; sums have the right bits, too.
Complex numbers travel as pairs."""
_WIDE = {
    **dict.fromkeys((tf.int8, tf.int16, tf.uint8, tf.uint16, tf.bool), tf.int32),
    **dict.fromkeys((tf.float16, tf.bfloat16), tf.float32),
}
"""Dtypes that travel as wider ones, and in which they are summed."""
_SUPPORTED = (tf.float32, tf.float64, tf.int32, tf.int64)
_FLOATS = (tf.float32, tf.float64)


@dataclass(frozen=True, slots=True)
class Counters:
    """The names of two variables on a CPU, which count exchanges for other threads."""

    begun: str
    ended: str
    device: str


@dataclass(frozen=True, slots=True)
class Collectives:
    """The ranks' devices, as one of them sees them; each process has one rank."""

    rank: int
    groups: Groups
    order: tuple[int, ...]
    """The ranks in the order in which TensorFlow gathers their tensors."""
    counters: Counters

    @property
    def size(self) -> int:
        return self.groups.cpus.size

    def devices_for(self, dtype: DType) -> DeviceGroup:
        return self.groups.large if dtype in _FLOATS else self.groups.cpus


@dataclass(frozen=True, slots=True)
class _Item:
    """A request, with the tensor that travels for it."""

    index: int
    request: ExchangeRequest
    dtype: DType
    """The dtype in which it travels."""
    shape: tuple[int, ...]
    """The shape of the whole tensor in that dtype."""

    @property
    def is_summed(self) -> bool:
        placement = self.request.placement
        return isinstance(placement, Partial) and placement.op == "sum"

    def blocks(self, size: int) -> _Blocks | None:
        """How the ranks' rows lie in the tensor, if each rank has its rows."""
        shard = self.request.placement
        if not isinstance(shard, Shard):
            return None
        rows = [Split(rank, size).local_block(shard) for rank in range(size)]
        before = math.prod(self.shape[: shard.dim]) * shard.outer
        return _Blocks(before, rows, math.prod(self.shape[shard.dim + 1 :]))


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A tensor of shape ``[before, sum(rows), after]``, with ``rows`` for each rank."""

    before: int
    rows: list[int]
    after: int

    @property
    def most(self) -> int:
        return max(self.rows)

    @property
    def is_even(self) -> bool:
        return len(set(self.rows)) == 1


@dataclass(slots=True)
class _Vector:
    """What goes through one op: the items' elements, one after the other."""

    dtype: DType
    is_summed: bool
    items: list[_Item] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    refs: list[Ref] = field(default_factory=list)


class OpsExchanger:
    """An ``Exchanger`` of ``program``; ``host`` does what the ops do not support."""

    scatters = False

    def __init__(self, collectives: Collectives, host: Exchanger, program: str) -> None:
        self.bucket_bytes = host.bucket_bytes
        self._collectives = collectives
        self._host = host
        self._program = program
        self._exchanges = 0
        self.words: list[str] = []

    def write(self, writer: OpWriter, requests: Sequence[ExchangeRequest]) -> list[Ref]:
        """See ``Exchanger``."""
        self._exchanges += 1
        self.words += words_of(requests)
        items = [_item(index, request) for index, request in enumerate(requests)]
        wholes: dict[int, Ref] = {}
        waits: list[str] = []
        left = [index for index, item in enumerate(items) if item is None]
        if left:
            refs = self._host.write(writer, [requests[index] for index in left])
            wholes.update(zip(left, refs, strict=True))
            waits = [writer.last]
        carried = [item for item in items if item is not None]
        if carried:
            write = _Ops(writer, self._collectives)
            words = (self._program, self._exchanges)
            with writer.after(waits):
                for item, ref in write.exchange(carried, words):
                    wholes[item.index] = ref
        return [wholes[index] for index in range(len(requests))]


def _item(index: int, request: ExchangeRequest) -> _Item | None:
    """The request as the ops carry it; None if they do not support it."""
    dtype, shape = request.ref.dtype, request.shape
    if shape is None or request.is_routed:
        return None
    sizes = tuple(size for size in shape if size is not None)
    if len(sizes) < len(shape) or 0 in sizes:
        return None
    if dtype in (tf.complex64, tf.complex128):
        sizes = (*sizes, 2)
    travels = dtype if dtype in _SUPPORTED else _BITS.get(dtype, _WIDE.get(dtype))
    return None if travels is None else _Item(index, request, travels, sizes)


class _Ops:
    """Writes the ops of one exchange."""

    def __init__(self, writer: OpWriter, collectives: Collectives) -> None:
        self._writer = writer
        self._collectives = collectives

    def exchange(
        self, items: Sequence[_Item], words: Iterable[object]
    ) -> list[tuple[_Item, Ref]]:
        """The whole tensors; the op that ends the exchange is ``writer.last``."""
        writer, wholes = self._writer, list[tuple[_Item, Ref]]()
        vectors = self._vectors(items)
        joined = [self._joined(vector) for vector in vectors]
        with writer.after(ref.node for ref in joined):
            self._count(self._collectives.counters.begun)
        results = []
        for number, (vector, ref) in enumerate(zip(vectors, joined, strict=True)):
            with writer.after([writer.last]):
                key = instance_key((*words, number, vector.dtype.name, *vector.sizes))
                results.append(self._collective(vector, ref, key))
        with writer.after([writer.last]):
            self._count(self._collectives.counters.ended)
        last = writer.last
        for vector, result in zip(vectors, results, strict=True):
            parts = self._split(vector, result)
            for item, part in zip(vector.items, parts, strict=True):
                wholes.append((item, self._whole(item, part)))
        writer.last = last
        return wholes

    # --- before -----------------------------------------------------------------------

    def _vectors(self, items: Sequence[_Item]) -> list[_Vector]:
        vectors: dict[tuple[DType, bool], _Vector] = {}
        for item in items:
            key = item.dtype, item.is_summed
            vector = vectors.setdefault(key, _Vector(*key))
            blocks = item.blocks(self._collectives.size)
            size = math.prod(item.shape)
            ref = self._converted(item.request.ref, item.dtype)
            if blocks is not None:
                ref = self._padded(ref, blocks)
                size = blocks.before * blocks.most * blocks.after
            vector.items.append(item)
            vector.sizes.append(size)
            vector.refs.append(self._reshape(ref, (size,)))
        return list(vectors.values())

    def _converted(self, ref: Ref, dtype: DType) -> Ref:
        if ref.dtype == dtype:
            return ref
        if ref.dtype in _BITS or dtype in _BITS:
            return self._op("Bitcast", [ref], type=dtype)
        return self._op("Cast", [ref], DstT=dtype)

    def _padded(self, ref: Ref, blocks: _Blocks) -> Ref:
        """This rank's rows, with zeros up to the most rows of any rank."""
        own = blocks.rows[self._collectives.rank]
        if own == blocks.most:
            return ref
        reshaped = self._reshape(ref, (blocks.before, own, blocks.after))
        paddings = self._constant([[0, 0], [0, blocks.most - own], [0, 0]])
        return self._op("Pad", [reshaped, paddings])

    def _joined(self, vector: _Vector) -> Ref:
        if len(vector.refs) == 1:
            return vector.refs[0]
        return self._op("ConcatV2", [vector.refs, self._constant(0)])

    # --- the ops ----------------------------------------------------------------------

    def _collective(self, vector: _Vector, ref: Ref, key: int) -> Ref:
        """The sum of the ranks' vectors, or a matrix with a row for each rank."""
        devices = self._collectives.devices_for(vector.dtype)
        attributes: dict[str, object] = {
            "T": vector.dtype,
            "Nordering_token": 0,
            "communication_hint": devices.hint,
            # A limit on the time may crash TensorFlow 2.21 when it expires.
            "timeout_seconds": 0.0,
        }
        kind = "CollectiveGatherV2"
        if vector.is_summed:
            kind = "CollectiveReduceV2"
            attributes |= {
                "merge_op": "Add",
                "final_op": "Id",
                "max_subdivs_per_device": SUBDIVISIONS,
            }
        else:
            ref = self._reshape(ref, (1, sum(vector.sizes)))
        numbers = [self._constant(n) for n in (devices.size, devices.key, key)]
        name = f"{SCOPE}/{kind}"
        result = self._writer.node(
            kind, [ref, *numbers], attributes, name, devices.own
        )[0]
        order = self._collectives.order
        if vector.is_summed or order == tuple(range(len(order))):
            return result
        last = self._writer.last
        places = self._constant([order.index(rank) for rank in range(len(order))])
        result = self._op("GatherV2", [result, places, self._constant(0)])
        self._writer.last = last
        return result

    def _count(self, name: str) -> None:
        device = self._collectives.counters.device
        handle = {"container": "", "shared_name": name}
        handle |= {"dtype": tf.int64, "shape": tf.TensorShape([])}
        writer, label = self._writer, f"{SCOPE}/count"
        one = writer.constant(np.array(1, np.int64))
        refs = writer.node("VarHandleOp", [], handle, f"{label}/handle", device)
        writer.node(
            "AssignAddVariableOp", [*refs, one], {"dtype": tf.int64}, label, device
        )

    # --- after ------------------------------------------------------------------------

    def _split(self, vector: _Vector, result: Ref) -> list[Ref]:
        if len(vector.sizes) == 1:
            return [result]
        axis = self._constant(0 if vector.is_summed else 1)
        sizes = self._constant(vector.sizes)
        attributes = {"num_split": len(vector.sizes)}
        return self._writer.op("SplitV", [result, sizes, axis], attributes)

    def _whole(self, item: _Item, part: Ref) -> Ref:
        """The whole tensor of a request."""
        dtype, placement = item.request.ref.dtype, item.request.placement
        if isinstance(placement, Shard):
            return self._converted(self._of_rows(item, part), dtype)
        if item.is_summed:
            return self._converted(self._reshape(part, item.shape), dtype)
        shape = (self._collectives.size, *item.shape)
        terms = self._converted(self._reshape(part, shape), dtype)
        names = {"max": "Max", "min": "Min"}
        if dtype == tf.bool:
            names = {"max": "Any", "min": "All"}
        axis = self._constant(0)
        assert isinstance(placement, Partial)
        return self._op(names[placement.op], [terms, axis], keep_dims=False)

    def _of_rows(self, item: _Item, part: Ref) -> Ref:
        size = self._collectives.size
        blocks = item.blocks(size)
        assert blocks is not None
        before, most, after = blocks.before, blocks.most, blocks.after
        if blocks.is_even:
            if before > 1:
                part = self._reshape(part, (size, before, most * after))
                part = self._op("Transpose", [part, self._constant([1, 0, 2])])
            return self._reshape(part, item.shape)
        pieces = self._writer.op(
            "Split", [self._constant(0), part], {"num_split": size}
        )
        origin = self._constant([0, 0, 0])
        parts = [
            self._op(
                "Slice",
                [
                    self._reshape(piece, (before, most, after)),
                    origin,
                    self._constant([before, rows, after]),
                ],
            )
            for piece, rows in zip(pieces, blocks.rows, strict=True)
        ]
        return self._reshape(
            self._op("ConcatV2", [parts, self._constant(1)]), item.shape
        )

    def _reshape(self, ref: Ref, shape: Sequence[int]) -> Ref:
        return self._op("Reshape", [ref, self._constant(shape)])

    def _constant(self, value: object) -> Ref:
        return self._writer.constant(np.array(value, np.int32))

    def _op(
        self, kind: str, inputs: Sequence[Ref | Sequence[Ref]], **attributes: object
    ) -> Ref:
        return self._writer.op(kind, inputs, attributes)[0]
