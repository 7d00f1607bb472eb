"""Combine tensors over all ranks, many in one exchange, with gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import Layout, ReduceOp, tensor_words
from tfcluster.runtime.collective.collectives import combine
from tfcluster.runtime.collective.sparse import Slices
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.exchange.graph_ops import exchange_op, may_be_differentiated
from tfcluster.runtime.exchange.wire_format import Carrier, Reduction, carrier
from tfcluster.runtime.process_sets import ProcessSet, global_process_set
from tfcluster.runtime.tensors import as_tensor

_LINEAR = (ReduceOp.AVERAGE, ReduceOp.SUM)


@dataclass(frozen=True, slots=True)
class Exchange:
    """What is done with several tensors at once, and how messages call it."""

    what: str
    reduction: Reduction
    differentiable: bool = True
    among: ProcessSet = global_process_set
    done: Callable[[], None] = lambda: None
    """Called on every rank each time that it has taken place."""


def reduce_tensors(
    exchange: Exchange, tensors: Sequence[Any], names: Sequence[str]
) -> list[Any]:
    """Tensors, IndexedSlices or None, combined over the ranks.

    None stays None, on all ranks or none. Slices are gathered, which makes their sum,
    and divided by the number of ranks where the average is wanted. Raises TypeError and
    ValueError for what cannot be combined.
    """
    kinds = [_kind(tensor) for tensor in tensors]
    dense = [as_tensor(t) for t in tensors if _kind(t) == _DENSE]
    sparse = [t for t in tensors if _kind(t) == _SPARSE]
    values = [as_tensor(slices.values) for slices in sparse]
    for array in values:
        _require_summable(array, exchange)
    indices = [as_tensor(slices.indices) for slices in sparse]
    plan = _Plan(exchange, tuple(zip(kinds, names, strict=True)), len(dense))
    results = plan.run([*dense, *values, *indices])
    found = {
        _DENSE: iter(results[: len(dense)]),
        _SPARSE: _slices(results[len(dense) :], sparse),
        _NONE: itertools.repeat(None),
    }
    return [next(found[kind]) for kind in kinds]


_DENSE, _SPARSE, _NONE = "dense", "sparse", "none"


def _kind(tensor: Any) -> str:
    if tensor is None:
        return _NONE
    return _SPARSE if isinstance(tensor, tf.IndexedSlices) else _DENSE


def _slices(results: Sequence[Any], local: Sequence[Any]) -> Iterator[Any]:
    for index, slices in enumerate(local):
        values, indices = results[index], results[len(local) + index]
        yield tf.IndexedSlices(values, indices, slices.dense_shape)


def _require_summable(values: Any, exchange: Exchange) -> None:
    op = exchange.reduction.op
    if op not in _LINEAR:
        raise ValueError(f"{exchange.what}: IndexedSlices have no {op.value}")
    if op is ReduceOp.AVERAGE and values.dtype.is_integer:
        raise TypeError(f"{exchange.what}: IndexedSlices of integers have no average")


@dataclass(frozen=True, slots=True)
class _Plan:
    """An exchange of flat tensors: dense ones, values of slices, their indices."""

    exchange: Exchange
    entries: tuple[tuple[str, str], ...]
    """Kind and name, in the program's order."""
    dense: int

    def run(self, flat: Sequence[Any]) -> list[Any]:
        wanted = self.exchange.differentiable and may_be_differentiated()
        if not (wanted and any(map(_inexact, flat))):
            return self._exchanged(flat)[0]

        def forward(*tensors: Any) -> Any:
            results, counts = self._exchanged(tensors)

            def backward(*upstream: Any) -> list[Any]:
                return self._gradients(tensors, results, counts, upstream)

            return results, backward

        return list(tf.nest.flatten(tf.custom_gradient(forward)(*flat)))

    def _sparse(self, flat: Sequence[Any]) -> int:
        return (len(flat) - self.dense) // 2

    def _exchanged(self, flat: Sequence[Any]) -> tuple[list[Any], Any]:
        """The results, and of each slices, if any, how many rows each rank has."""
        reduction = self.exchange.reduction
        moved = self.dense + self._sparse(flat)
        carriers = [carrier(t, reduction, self.exchange.what) for t in flat[:moved]]
        sent = [*(c.tensor for c in carriers), *flat[moved:]]
        types = [tensor.dtype for tensor in sent]
        if self._sparse(flat):
            types.append(tf.int64)
        results = exchange_op(
            self._act(carriers),
            sent,
            types,
            self.exchange.what,
            self.exchange.among,
        )
        counts = results.pop() if self._sparse(flat) else None
        for index, (result, local) in enumerate(zip(results, flat, strict=True)):
            whole = index < self.dense
            result.set_shape(local.shape if whole else [None, *local.shape[1:]])
            if index < moved:
                restored = carriers[index].restored(result)
                results[index] = restored if whole else self._shared(restored)
        return results, counts

    def _shared(self, values: Any) -> Any:
        """Values of slices, which have only been gathered, as the operation wants."""
        if self.exchange.reduction.op is ReduceOp.SUM:
            return values
        return values / tf.cast(self.exchange.among.size(), values.dtype)

    def _act(self, carriers: Sequence[Carrier]) -> Callable[..., list[Array]]:
        dense, exchange = self.dense, self.exchange

        def act(*arrays: Array) -> list[Array]:
            sparse = self._sparse(arrays)
            values, indices = arrays[dense : dense + sparse], arrays[dense + sparse :]
            reduced, gathered = combine(
                exchange.among.group(),
                arrays[:dense],
                [Slices(v, i) for v, i in zip(values, indices, strict=True)],
                exchange.reduction.op,
                self._layout(carriers, arrays),
            )
            exchange.done()
            if not gathered:
                return reduced
            return [
                *reduced,
                *(found.slices.values for found in gathered),
                *(found.slices.indices for found in gathered),
                np.array([found.counts for found in gathered], np.int64),
            ]

        return act

    def _layout(self, carriers: Sequence[Carrier], arrays: Sequence[Array]) -> Layout:
        positions = {_DENSE: itertools.count(), _SPARSE: itertools.count(self.dense)}
        words = []
        for kind, name in self.entries:
            if kind == _NONE:
                words.append(f"{name} without gradient")
                continue
            index = next(positions[kind])
            shape, dtype = arrays[index].shape, carriers[index].words
            if kind == _SPARSE:
                words.append(f"rows of {tensor_words(name, dtype, shape[1:])}")
            else:
                words.append(tensor_words(name, dtype, shape))
        return Layout(self.exchange.reduction.words(self.exchange.what), tuple(words))

    def _gradients(
        self,
        flat: Sequence[Any],
        results: Sequence[Any],
        counts: Any,
        upstream: Sequence[Any],
    ) -> list[Any]:
        """Of the sum over all ranks of what is made of the results."""
        reduction = self.exchange.reduction
        if reduction.op not in _LINEAR:
            what = reduction.words(self.exchange.what)
            raise ValueError(f"{what} has no gradient")
        wanted = [
            index
            for index in range(self.dense + self._sparse(flat))
            if _inexact(flat[index])
        ]
        given = [
            tf.zeros_like(results[i]) if upstream[i] is None else upstream[i]
            for i in wanted
        ]
        totals = reduce_tensors(
            replace(
                self.exchange,
                what=f"gradient of {self.exchange.what}",
                done=_nothing,
            ),
            given,
            [f"tensor {index}" for index in wanted],
        )
        gradients: list[Any] = [None] * len(flat)
        for index, total in zip(wanted, totals, strict=True):
            gradients[index] = (
                total
                if index < self.dense
                else _own_rows(
                    total, counts[index - self.dense], self.exchange.among.rank()
                )
            )
        return gradients


def _nothing() -> None:
    pass


def _inexact(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _own_rows(gathered: Any, counts: Any, rank: int) -> Any:
    """The rank's part of what the ranks' rows have been put together to."""
    start = tf.reduce_sum(counts[:rank])
    return gathered[start : start + counts[rank]]
