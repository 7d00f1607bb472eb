"""What ranks exchange in a program, and the host's way to do it.

An exchange is one op, which calls Python. It carries several tensors at once: sums,
maxima and minima over the ranks, and tensors of which every rank has its rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import Group, ReduceOp, Signature, tensor_words
from tfcluster.runtime.collective.group import CollectiveCall
from tfcluster.runtime.collective.packing import reduced
from tfcluster.runtime.collective.shard_sums import reduced_in_order
from tfcluster.runtime.collective.transports.base import Transport
from tfcluster.runtime.partition.placement import Partial, Shape, Shard
from tfcluster.runtime.partition.tf_functions import HostFunction
from tfcluster.runtime.partition.writer import Ref, Writer
from tfcluster.runtime.tensor_types import Array

Terms: TypeAlias = Sequence[Array]
"""What a process has of a tensor that is to be reduced; see ``Request``."""
Reduce: TypeAlias = Callable[[CollectiveCall, Sequence[Terms], ReduceOp], list[Array]]

_OPS = {"sum": ReduceOp.SUM, "max": ReduceOp.MAX, "min": ReduceOp.MIN}


@dataclass(frozen=True, slots=True)
class Request:
    """A tensor that every rank needs whole, and what this rank has of it."""

    refs: tuple[Ref, ...]
    """This process's rows, or its term; with several ranks, those of its subtrees."""
    placement: Partial | Shard
    shape: Shape | None
    """The shape of the whole tensor."""
    name: str


class Exchanger(Protocol):
    """Writes the exchanges between the processes."""

    def write(self, writer: Writer, requests: Sequence[Request]) -> list[Ref]:
        """Write one exchange; returns the whole tensors, in order.

        The op that ends the exchange is then ``writer.last``.
        """
        ...


class HostExchanger:
    """Exchanges by calls of a function on the host.

    ``program`` says in signatures which program exchanges: ranks with different
    programs get an error instead of a wrong sum. With ``shards``, each process has
    some of so many ranks, and reductions have one order.
    """

    def __init__(self, group: Group, program: str, shards: int | None = None) -> None:
        self._group = group
        self._program = program
        self._shards = shards
        self._functions: list[HostFunction] = []
        """They must live as long as the ops that call them."""

    def write(self, writer: Writer, requests: Sequence[Request]) -> list[Ref]:
        """See ``Exchanger``."""
        dtypes = [each.refs[0].dtype for each in requests]
        words = tuple(
            tensor_words(f"{each.name} {each.placement}", dtype.name, each.shape or ())
            for each, dtype in zip(requests, dtypes, strict=True)
        )
        what = f"exchange {len(self._functions) + 1} of {self._program}"
        group, signature = self._group, Signature(what, words)
        placements = [each.placement for each in requests]
        counts = [len(each.refs) for each in requests]
        reduce = _reduced if self._shards is None else _in_order_of(self._shards)

        def run(*arrays: Array) -> list[Array]:
            rest = iter(arrays)
            terms = [list(itertools.islice(rest, count)) for count in counts]
            with group.exchange(signature) as call:
                results = _reduced_by_op(call, terms, placements, reduce)
                for index, placement in enumerate(placements):
                    if isinstance(placement, Shard):
                        results[index] = gathered(
                            call.transport, terms[index][0], placement
                        )
            return [np.asarray(results[i], order="C") for i in range(len(terms))]

        function = HostFunction(run)
        self._functions.append(function)
        return writer.op(
            "PyFunc",
            [[ref for each in requests for ref in each.refs]],
            {"token": function.token, "Tout": dtypes},
            "exchange",
        )


def _reduced(call: CollectiveCall, terms: Sequence[Terms], op: ReduceOp) -> list[Array]:
    return reduced(call, [term for (term,) in terms], op)


def _in_order_of(shards: int) -> Reduce:
    return partial(reduced_in_order, shards=shards)


def _reduced_by_op(
    call: CollectiveCall,
    terms: Sequence[Terms],
    placements: Sequence[Partial | Shard],
    reduce: Reduce,
) -> dict[int, Array]:
    results: dict[int, Array] = {}
    for name, op in _OPS.items():
        chosen = [i for i, p in enumerate(placements) if p == Partial(name)]
        if chosen:
            numbers = [[_numbers(term) for term in terms[i]] for i in chosen]
            for i, array in zip(chosen, reduce(call, numbers, op), strict=True):
                results[i] = array.astype(terms[i][0].dtype, copy=False)
    return results


def _numbers(array: Array) -> Array:
    return array.astype(np.uint8) if array.dtype == np.bool_ else array


def gathered(transport: Transport, array: Array, shard: Shard) -> Array:
    """The whole array, of which every rank has its rows."""
    parts = transport.allgather(_packed(array))
    before, after = array.shape[: shard.dim], array.shape[shard.dim + 1 :]
    shape = (*before, shard.outer, -1, *after)
    if 0 in before or 0 in after:
        return np.zeros((*before, shard.size, *after), array.dtype)
    whole = np.concatenate(
        [_unpacked(part, array.dtype).reshape(shape) for part in parts],
        axis=shard.dim + 1,
    )
    return whole.reshape((*before, shard.size, *after))


def _packed(array: Array) -> bytes:
    """The elements; strings after their number and their lengths."""
    if array.dtype != np.object_:
        return np.ascontiguousarray(array).tobytes()
    strings = [bytes(each) for each in array.reshape(-1)]
    sizes = np.array([len(strings), *map(len, strings)], np.int64)
    return b"".join([sizes.tobytes(), *strings])


def _unpacked(data: bytes, dtype: np.dtype[Any]) -> Array:
    """The elements, in one dimension."""
    if dtype != np.object_:
        return np.frombuffer(data, dtype)
    count = int(np.frombuffer(data, np.int64, 1)[0])
    sizes = np.frombuffer(data, np.int64, count, 8)
    ends = 8 * (count + 1) + np.cumsum(sizes)
    found = np.empty(count, np.object_)
    for index, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        found[index] = bytes(data[end - size : end])
    return found


def supports(dtype: object) -> bool:
    """Whether the host can exchange tensors of this dtype."""
    return dtype not in (tf.resource, tf.variant)
