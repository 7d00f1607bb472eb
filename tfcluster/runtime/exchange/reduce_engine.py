"""Combine tensors over all ranks, many in one exchange.

Everything that reduces gradients calls ``exchange_list``: the Keras hooks
(``keras.train.gradient_allreduce``) with a mean weighted by rows, and the Horovod-like
API through ``reduce_tensors``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import ReduceOp, Signature
from tfcluster.runtime.collective.collectives import combine
from tfcluster.runtime.collective.sparse import Slices
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.exchange.graph_ops import exchange_op, may_be_differentiated
from tfcluster.runtime.exchange.tensor_list import TensorList, flattened
from tfcluster.runtime.exchange.wire_format import Carrier, Reduction, carrier
from tfcluster.runtime.process_sets import ProcessSet, global_process_set
from tfcluster.runtime.tensor_types import Gradient, Tensor
from tfcluster.runtime.tensors import is_inexact

_LINEAR = (ReduceOp.AVERAGE, ReduceOp.SUM)


class Combine(Protocol):
    """The collective operation that ranks run on their arrays in an exchange."""

    def __call__(
        self, context: Sequence[Array], dense: Sequence[Array], sparse: list[Slices]
    ) -> tuple[Sequence[Array], Sequence[Slices], Sequence[Array]]:
        """Return the reduced arrays, the gathered slices, and any further arrays."""
        ...


def exchange_list(
    tensors: TensorList,
    carriers: Sequence[Carrier],
    combine: Combine,
    call: Callable[..., Any],
    *,
    context: Sequence[Any] = (),
    others: Sequence[Any] = (),
) -> tuple[TensorList, list[Any]]:
    """Apply ``combine`` to the arrays of ``tensors``; return a list of the same kinds.

    ``carriers`` define how the dense tensors and the slices' values are sent. ``call``
    gets a function of arrays, its input tensors and the dtypes of its results; it makes
    an op of them or calls the function. ``combine`` also gets the values of the tensors
    in ``context``. The further arrays that it returns, of dtypes ``others``, are
    returned beside the list.
    """

    def run(*arrays: Array) -> list[Array]:
        given = len(context)
        dense, sparse = tensors.unflattened(arrays[given:])
        reduced, gathered, more = combine(arrays[:given], dense, sparse)
        return [*flattened(reduced, gathered), *more]

    sent = [*(each.tensor for each in carriers), *tensors.indices]
    types = [*(tensor.dtype for tensor in sent), *others]
    results = tf.nest.flatten(call(run, [*context, *sent], types))
    flat = results[: len(sent)]
    for index, (result, local) in enumerate(zip(flat, tensors.flat, strict=True)):
        dense = index < tensors.dense_count
        result.set_shape(local.shape if dense else [None, *local.shape[1:]])
    for index, each in enumerate(carriers):
        flat[index] = each.restored(flat[index])
    return tensors.with_flat(flat), results[len(sent) :]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A reduction of several tensors at once; ``what`` names it in messages."""

    what: str
    reduction: Reduction
    differentiable: bool = True
    among: ProcessSet = global_process_set
    done: Callable[[], None] = lambda: None
    """Called on every rank after each time that the exchange has run."""


def reduce_tensors(
    exchange: Exchange, tensors: Sequence[Tensor], names: Sequence[str]
) -> list[Any]:
    """Combine tensors, IndexedSlices or None over the ranks.

    An entry must be None on all ranks or on none; it stays None. Slices are summed by
    gathering them, and divided by the number of ranks for an average. Raises TypeError
    and ValueError for tensors that the operation cannot combine.
    """
    given = TensorList.of(tensors)
    for values in given.flat[given.dense_count : given.summed_count]:
        _require_summable(values, exchange)
    return _Plan(exchange, tuple(names)).run(given).tensors()


def _require_summable(values: Any, exchange: Exchange) -> None:
    op = exchange.reduction.op
    if op not in _LINEAR:
        raise ValueError(f"{exchange.what}: IndexedSlices have no {op.value}")
    if op is ReduceOp.AVERAGE and values.dtype.is_integer:
        raise TypeError(f"{exchange.what}: IndexedSlices of integers have no average")


@dataclass(frozen=True, slots=True)
class _Plan:
    """An exchange of a list with these names, in the program's order."""

    exchange: Exchange
    names: tuple[str, ...]

    def run(self, given: TensorList) -> TensorList:
        wanted = self.exchange.differentiable and may_be_differentiated()
        if not (wanted and any(map(is_inexact, given.flat))):
            return self._exchanged(given)[0]

        def forward(*flat: Any) -> Any:
            local = given.with_flat(flat)
            results, counts = self._exchanged(local)

            def backward(*upstream: Any) -> list[Any]:
                return self._gradients(local, results, counts, upstream)

            return list(results.flat), backward

        flat = tf.nest.flatten(tf.custom_gradient(forward)(*given.flat))
        return given.with_flat(flat)

    def _exchanged(self, given: TensorList) -> tuple[TensorList, Any]:
        """The results, and the ranks' row counts (slices x ranks) or None."""
        exchange = self.exchange
        carriers = [
            carrier(tensor, exchange.reduction, exchange.what)
            for tensor in given.flat[: given.summed_count]
        ]

        def call(run: Callable[..., Any], sent: Sequence[Any], types: Any) -> Any:
            return exchange_op(run, sent, types, exchange.what, exchange.among)

        found, counts = exchange_list(
            given,
            carriers,
            self._combine(given, carriers),
            call,
            others=[tf.int64] if given.shapes else [],
        )
        flat = list(found.flat)
        for index in range(given.dense_count, given.summed_count):
            flat[index] = self._shared(flat[index])
        return found.with_flat(flat), counts[0] if counts else None

    def _shared(self, values: Any) -> Any:
        """Gathered slice values, divided by the number of ranks for an average."""
        if self.exchange.reduction.op is ReduceOp.SUM:
            return values
        return values / tf.cast(self.exchange.among.size(), values.dtype)

    def _combine(self, given: TensorList, carriers: Sequence[Carrier]) -> Combine:
        exchange = self.exchange

        def act(
            context: Sequence[Array], dense: Sequence[Array], sparse: list[Slices]
        ) -> tuple[Sequence[Array], Sequence[Slices], Sequence[Array]]:
            reduced, gathered = combine(
                exchange.among.group(),
                dense,
                sparse,
                exchange.reduction.op,
                self._signature(given, carriers, dense, sparse),
            )
            exchange.done()
            counts = [np.array([g.counts for g in gathered], np.int64)]
            return reduced, [g.slices for g in gathered], counts if gathered else []

        return act

    def _signature(
        self,
        given: TensorList,
        carriers: Sequence[Carrier],
        dense: Sequence[Array],
        sparse: Sequence[Slices],
    ) -> Signature:
        whole, rows = carriers[: given.dense_count], carriers[given.dense_count :]
        forms = given.in_order(
            [(c.words, array.shape) for c, array in zip(whole, dense, strict=True)],
            [(c.words, s.values.shape[1:]) for c, s in zip(rows, sparse, strict=True)],
        )
        words = tuple(
            kind.words(name, *(form or ("", ())))
            for kind, name, form in zip(given.kinds, self.names, forms, strict=True)
        )
        return Signature(self.exchange.reduction.words(self.exchange.what), words)

    def _gradients(
        self,
        given: TensorList,
        results: TensorList,
        counts: Any,
        upstream: Sequence[Any],
    ) -> list[Any]:
        """Gradients of the sum, over all ranks, of what each makes of the results."""
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
                total if number < 0 else _own_rows(total, counts[number], among.rank())
            )
        return gradients


def _nothing() -> None:
    pass


def _own_rows(gathered: Any, counts: Any, rank: int) -> Any:
    """The part of the gathered rows that belongs to ``rank``."""
    start = tf.reduce_sum(counts[:rank])
    return gathered[start : start + counts[rank]]
