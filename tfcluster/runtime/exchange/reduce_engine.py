"""The reductions of the Horovod-like API: many tensors in one exchange."""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import ReduceOp, Signature, tensor_words
from tfcluster.runtime.collective.collectives import combine
from tfcluster.runtime.collective.transports.base import Array, Slices
from tfcluster.runtime.exchange.graph_ops import exchange_op, with_gradients
from tfcluster.runtime.exchange.wire_format import Reduction, to_wire
from tfcluster.runtime.process_sets import ProcessSet, global_process_set
from tfcluster.runtime.tensor_types import Gradient, Tensor
from tfcluster.runtime.tensors import as_tensor, is_inexact, is_sparse

D = TypeVar("D")
S = TypeVar("S")


class ReduceKind(enum.Enum):
    """The kind of a list's entry; the values distinguish lists in messages."""

    NONE = "-"
    DENSE = "d"
    SPARSE = "s"

    @classmethod
    def of(cls, value: Gradient) -> ReduceKind:
        """The kind of ``value``, a tensor (or convertible), IndexedSlices or None."""
        if value is None:
            return cls.NONE
        return cls.SPARSE if is_sparse(value) else cls.DENSE

    def words(self, name: str, dtype: str, shape: Sequence[int | None]) -> str:
        """The entry in a signature, such as ``rows of table float32 [3, 4]``."""
        if self is ReduceKind.NONE:
            return f"{name} without gradient"
        words = tensor_words(name, dtype, shape)
        return f"rows of {words}" if self is ReduceKind.SPARSE else words


@dataclass(frozen=True, slots=True)
class TensorList:
    """The entries of a list by kind, as they are sent: one flat list without Nones.

    In each IndexedSlices, the values have shape (n, ...), the indices are int32 or
    int64 of shape (n,), and the ``dense_shape`` is an integer vector or None.
    """

    kinds: tuple[ReduceKind, ...]
    """The kind of each entry, in the program's order."""
    flat: tuple[Tensor, ...]
    """The dense tensors, the slices' values, the slices' indices."""
    shapes: tuple[Tensor | None, ...]
    """The ``dense_shape`` of each IndexedSlices."""

    @classmethod
    def of(cls, values: Sequence[Gradient]) -> TensorList:
        """Sort ``values``, each a tensor (or convertible), IndexedSlices or None.

        Raises ValueError or TypeError for a value that TensorFlow cannot convert.
        """
        kinds = tuple(map(ReduceKind.of, values))
        dense = [v for v in values if v is not None and not is_sparse(v)]
        sparse = [v for v in values if is_sparse(v)]
        return cls(
            kinds,
            (
                *map(as_tensor, dense),
                *(as_tensor(slices.values) for slices in sparse),
                *(as_tensor(slices.indices) for slices in sparse),
            ),
            tuple(slices.dense_shape for slices in sparse),
        )

    @property
    def dense_count(self) -> int:
        """The number of dense tensors."""
        return len(self.flat) - 2 * len(self.shapes)

    @property
    def summed_count(self) -> int:
        """The number of tensors of ``flat`` that are summed: all except the indices."""
        return len(self.flat) - len(self.shapes)

    def with_flat(self, flat: Sequence[Tensor]) -> TensorList:
        """A list of the same kinds with other tensors, in the order of ``flat``.

        There must be as many as in ``flat``.
        """
        # Not dataclasses.replace, which takes four times as long.
        return TensorList(self.kinds, tuple(flat), self.shapes)

    def unflattened(
        self, arrays: Sequence[Array]
    ) -> tuple[Sequence[Array], list[Slices]]:
        """The dense arrays and the slices, from arrays in the order of ``flat``.

        Raises ValueError if the numbers of values and indices differ.
        """
        dense, summed = self.dense_count, self.summed_count
        pairs = zip(arrays[dense:summed], arrays[summed:], strict=True)
        return arrays[:dense], [Slices(*pair) for pair in pairs]

    def in_order(self, dense: Sequence[D], sparse: Sequence[S]) -> list[D | S | None]:
        """The values in the program's order, with None for each entry that was None.

        ``dense`` and ``sparse`` have a value for each entry of these kinds.
        """
        if len(dense) == len(self.kinds):
            return list(dense)
        iterators: dict[ReduceKind, Iterator[D | S | None]] = {
            ReduceKind.DENSE: iter(dense),
            ReduceKind.SPARSE: iter(sparse),
            ReduceKind.NONE: itertools.repeat(None),
        }
        return [next(iterators[kind]) for kind in self.kinds]

    def tensors(self) -> list[Gradient]:
        """The entries in the program's order: tensors, IndexedSlices and None."""
        dense, summed = self.dense_count, self.summed_count
        values, indices = self.flat[dense:summed], self.flat[summed:]
        slices = [
            tf.IndexedSlices(*parts)
            for parts in zip(values, indices, self.shapes, strict=True)
        ]
        return self.in_order(self.flat[:dense], slices)


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
    changes their number of rows, and divided by the number of ranks for an average,
    which has floats if the values are integers.
    ``names`` are used in messages, one per entry. Raises TypeError, ValueError and
    NotImplementedError for tensors that the operation cannot combine (see
    ``tfcluster.runtime.allreduce``), CollectiveMismatchError if the ranks' lists
    differ, and another CollectiveError if a rank is lost or late; in a graph, when the
    op runs.
    """
    entries = TensorList.of(tensors)
    if entries.summed_count > entries.dense_count:
        _require_linear(exchange)

    def forward(*flat: Tensor) -> tuple[list[Tensor], Callable[..., list[Gradient]]]:
        results, counts = _exchanged(exchange, names, entries.with_flat(flat))

        def backward(*upstream: Gradient) -> list[Gradient]:
            return _gradients(exchange, entries, results, counts, upstream)

        return results, backward

    if exchange.differentiable:
        results = with_gradients(forward, entries.flat)
    else:
        results = forward(*entries.flat)[0]
    return entries.with_flat(results).tensors()


def _require_linear(exchange: Exchange) -> None:
    op = exchange.reduction.op
    if op not in _LINEAR:
        message = f"{exchange.what}: IndexedSlices do not support {op.value}"
        raise NotImplementedError(message)


def _exchanged(
    exchange: Exchange, names: Sequence[str], inputs: TensorList
) -> tuple[list[Tensor], Tensor]:
    """The results, and the row counts of each IndexedSlices that each rank sent.

    The counts are int64 of shape (slices, ranks).
    """
    reduction, among = exchange.reduction, exchange.among
    summed = inputs.flat[: inputs.summed_count]
    wired = [to_wire(tensor, reduction, exchange.what) for tensor in summed]

    def run(*arrays: Array) -> list[Array]:
        dense, sparse = inputs.unflattened(arrays)
        shapes = [array.shape for array in dense]
        shapes += [rows.values.shape[1:] for rows in sparse]
        entries = [(w.words, shape) for w, shape in zip(wired, shapes, strict=True)]
        signature = _signature_of(
            reduction.words(exchange.what),
            inputs.kinds,
            tuple(names),
            tuple(inputs.in_order(entries[: len(dense)], entries[len(dense) :])),
        )
        reduced, gathered = combine(
            among.group(), dense, sparse, reduction.op, signature
        )
        exchange.done()
        return [
            *reduced,
            *(rows.slices.values for rows in gathered),
            *(rows.slices.indices for rows in gathered),
            np.array([rows.counts for rows in gathered], np.int64),
        ]

    sent = [*(wire.tensor for wire in wired), *inputs.flat[inputs.summed_count :]]
    types = [*(tensor.dtype for tensor in sent), tf.int64]
    *results, counts = exchange_op(run, sent, types, exchange.what, among)
    for index, (result, local) in enumerate(zip(results, inputs.flat, strict=True)):
        is_dense = index < inputs.dense_count
        result.set_shape(local.shape if is_dense else [None, *local.shape[1:]])
    for index, wire in enumerate(wired):
        results[index] = wire.restored(results[index])
        if index >= inputs.dense_count and reduction.op is ReduceOp.AVERAGE:
            results[index] /= tf.cast(among.size(), results[index].dtype)
    return results, counts


def _gradients(
    exchange: Exchange,
    entries: TensorList,
    results: Sequence[Tensor],
    counts: Tensor,
    upstream: Sequence[Gradient],
) -> list[Gradient]:
    """The gradients of the inputs, for the sum of all ranks' losses.

    ``upstream`` are the gradients of the results, as in ``tf.custom_gradient``. As in
    Horovod, a sum's gradient is the sum of the ranks' upstream gradients, and an
    average's gradient is their average.
    """
    reduction = exchange.reduction
    if reduction.op not in _LINEAR:
        raise ValueError(f"{reduction.words(exchange.what)} has no gradient")
    summed = range(entries.summed_count)
    wanted = [index for index in summed if is_inexact(entries.flat[index])]
    totals = reduce_tensors(
        replace(exchange, what=f"gradient of {exchange.what}", done=_nothing),
        [
            tf.zeros_like(results[i]) if upstream[i] is None else upstream[i]
            for i in wanted
        ],
        [f"tensor {index}" for index in wanted],
    )
    gradients: list[Gradient] = [None] * len(entries.flat)
    for index, total in zip(wanted, totals, strict=True):
        number = index - entries.dense_count
        gradients[index] = (
            total
            if number < 0
            else _own_rows(as_tensor(total), counts[number], exchange.among.rank())
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
    kinds: tuple[ReduceKind, ...],
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
