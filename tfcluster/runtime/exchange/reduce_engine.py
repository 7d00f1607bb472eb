"""The reductions of the Horovod-like API: many tensors in one exchange, with gradients.

The Keras hooks, which weight the mean by rows, use ``keras.train.gradient_allreduce``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import ReduceOp, Signature
from tfcluster.runtime.collective.collectives import combine
from tfcluster.runtime.collective.sparse import Slices
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.exchange.graph_ops import exchange_op, may_be_differentiated
from tfcluster.runtime.exchange.tensor_list import (
    Combine,
    Kind,
    TensorList,
    exchange_list,
)
from tfcluster.runtime.exchange.wire_format import Reduction, WireTensor, to_wire
from tfcluster.runtime.process_sets import ProcessSet, global_process_set
from tfcluster.runtime.tensor_types import DType, Gradient, Tensor
from tfcluster.runtime.tensors import as_tensor, is_inexact

_LINEAR = (ReduceOp.AVERAGE, ReduceOp.SUM)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A reduction of several tensors at once; ``what`` names it in messages.

    If it is not ``differentiable``, its results have no gradient. ``among`` are the
    ranks that take part.
    """

    what: str
    reduction: Reduction
    differentiable: bool = True
    among: ProcessSet = global_process_set
    done: Callable[[], None] = lambda: None
    """Called on every rank after each time that the exchange has run."""


def reduce_tensors(
    exchange: Exchange, tensors: Sequence[Gradient], names: Sequence[str]
) -> list[Gradient]:
    """Combine tensors, IndexedSlices or None over the ranks; shapes and dtypes stay.

    Tensors have any shapes, and dtypes of ``graph_ops.NUMBERS``. An entry must be None
    on all ranks or on none; it stays None. Slices are summed by gathering them, which
    changes their number of rows, and divided by the number of ranks for an average.
    ``names`` are used in messages, one per entry. Raises TypeError, ValueError and
    NotImplementedError for tensors that the operation cannot combine (see
    ``tfcluster.runtime.allreduce``), CollectiveMismatchError if the ranks' lists
    differ, and another CollectiveError if a rank is lost or late; in a graph, when the
    op runs.
    """
    given = TensorList.of(tensors)
    for values in given.flat[given.dense_count : given.summed_count]:
        _require_summable(values, exchange)
    return _Plan(exchange, tuple(names)).run(given).tensors()


def _require_summable(values: Tensor, exchange: Exchange) -> None:
    op = exchange.reduction.op
    if op not in _LINEAR:
        raise ValueError(f"{exchange.what}: IndexedSlices do not support {op.value}")
    if op is ReduceOp.AVERAGE and values.dtype.is_integer:
        raise TypeError(f"{exchange.what}: IndexedSlices of integers have no average")


@dataclass(frozen=True, slots=True)
class _Plan:
    """An exchange of a list with these names, in the program's order."""

    exchange: Exchange
    names: tuple[str, ...]

    def run(self, given: TensorList) -> TensorList:
        differentiable = self.exchange.differentiable and may_be_differentiated()
        if not (differentiable and any(map(is_inexact, given.flat))):
            return self._exchanged(given)[0]

        def forward(
            *flat: Tensor,
        ) -> tuple[list[Tensor], Callable[..., list[Gradient]]]:
            local = given.with_flat(flat)
            results, counts = self._exchanged(local)

            def backward(*upstream: Gradient) -> list[Gradient]:
                return self._gradients(local, results, counts, upstream)

            return list(results.flat), backward

        flat = tf.nest.flatten(tf.custom_gradient(forward)(*given.flat))
        return given.with_flat(flat)

    def _exchanged(self, given: TensorList) -> tuple[TensorList, Tensor | None]:
        """The results, and the row counts of each IndexedSlices that each rank sent.

        The counts are int64 of shape (slices, ranks), or None if there are no slices.
        """
        exchange = self.exchange
        wire_tensors = [
            to_wire(tensor, exchange.reduction, exchange.what)
            for tensor in given.flat[: given.summed_count]
        ]

        def call(
            run: Callable[..., Sequence[Array]],
            sent: Sequence[Tensor],
            types: Sequence[DType],
        ) -> list[Tensor]:
            return exchange_op(run, sent, types, exchange.what, exchange.among)

        found, counts = exchange_list(
            given,
            wire_tensors,
            self._combine(given, wire_tensors),
            call,
            others=[tf.int64] if given.shapes else [],
        )
        flat = list(found.flat)
        for index in range(given.dense_count, given.summed_count):
            flat[index] = self._scaled(flat[index])
        return found.with_flat(flat), counts[0] if counts else None

    def _scaled(self, values: Tensor) -> Tensor:
        """Gathered slice values, divided by the number of ranks for an average."""
        if self.exchange.reduction.op is ReduceOp.SUM:
            return values
        return values / tf.cast(self.exchange.among.size(), values.dtype)

    def _combine(
        self, given: TensorList, wire_tensors: Sequence[WireTensor]
    ) -> Combine:
        exchange = self.exchange

        def act(
            context: Sequence[Array], dense: Sequence[Array], sparse: list[Slices]
        ) -> tuple[Sequence[Array], Sequence[Slices], Sequence[Array]]:
            reduced, gathered = combine(
                exchange.among.group(),
                dense,
                sparse,
                exchange.reduction.op,
                self._signature(given, wire_tensors, dense, sparse),
            )
            exchange.done()
            counts = [np.array([g.counts for g in gathered], np.int64)]
            return reduced, [g.slices for g in gathered], counts if gathered else []

        return act

    def _signature(
        self,
        given: TensorList,
        wire_tensors: Sequence[WireTensor],
        dense: Sequence[Array],
        sparse: Sequence[Slices],
    ) -> Signature:
        of_dense = wire_tensors[: given.dense_count]
        of_sparse = wire_tensors[given.dense_count :]
        dtypes_and_shapes = given.in_order(
            [(c.words, a.shape) for c, a in zip(of_dense, dense, strict=True)],
            [
                (c.words, slices.values.shape[1:])
                for c, slices in zip(of_sparse, sparse, strict=True)
            ],
        )
        what = self.exchange.reduction.words(self.exchange.what)
        return _signature_of(what, given.kinds, self.names, tuple(dtypes_and_shapes))

    def _gradients(
        self,
        given: TensorList,
        results: TensorList,
        counts: Tensor | None,
        upstream: Sequence[Gradient],
    ) -> list[Gradient]:
        """The gradients of the inputs, for the sum of all ranks' losses.

        ``upstream`` are the gradients of the results, as in ``tf.custom_gradient``.
        As in Horovod, a sum's gradient is the sum of the ranks' upstream gradients,
        and an average's gradient is their average.
        """
        reduction, among = self.exchange.reduction, self.exchange.among
        if reduction.op not in _LINEAR:
            what = reduction.words(self.exchange.what)
            raise ValueError(f"{what} has no gradient")
        summed = range(given.summed_count)
        wanted = [index for index in summed if is_inexact(given.flat[index])]
        totals = reduce_tensors(
            replace(
                self.exchange,
                what=f"gradient of {self.exchange.what}",
                done=_nothing,
            ),
            [
                tf.zeros_like(results.flat[i]) if upstream[i] is None else upstream[i]
                for i in wanted
            ],
            [f"tensor {index}" for index in wanted],
        )
        gradients: list[Gradient] = [None] * len(given.flat)
        for index, total in zip(wanted, totals, strict=True):
            number = index - given.dense_count
            gradients[index] = (
                total
                if number < 0 or counts is None
                else _own_rows(as_tensor(total), counts[number], among.rank())
            )
        return gradients


def _nothing() -> None:
    pass


def _own_rows(gathered: Tensor, counts: Tensor, rank: int) -> Tensor:
    """The gathered rows that ``rank`` has sent; ``counts`` has each rank's count."""
    start = tf.reduce_sum(counts[:rank])
    return gathered[start : start + counts[rank]]


@functools.lru_cache(maxsize=256)
def _signature_of(
    what: str,
    kinds: tuple[Kind, ...],
    names: tuple[str, ...],
    entries: tuple[tuple[str, tuple[int, ...]] | None, ...],
) -> Signature:
    """The signature of an exchange; each entry has a dtype and a shape, or is None.

    Eager programs repeat their exchanges, so the signature is kept.
    """
    words = tuple(
        kind.words(name, *(entry or ("", ())))
        for kind, name, entry in zip(kinds, names, entries, strict=True)
    )
    return Signature(what, words)
