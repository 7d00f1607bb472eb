"""allreduce, grouped_allreduce and reducescatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import tensorflow as tf

from tfcluster.runtime.collective import ReduceOp
from tfcluster.runtime.exchange.gather_broadcast import gather_tensors
from tfcluster.runtime.exchange.graph_ops import (
    unconverted,
    with_gradients,
)
from tfcluster.runtime.exchange.reduce_engine import Exchange, reduce_tensors
from tfcluster.runtime.exchange.reduced_tensors import reduced
from tfcluster.runtime.exchange.wire_format import (
    Compression,
    Compressor,
    Reduction,
    chosen_op,
    scaled_by,
)
from tfcluster.runtime.process_sets import ProcessSet, global_process_set
from tfcluster.runtime.tensor_types import AGradient, Gradient, Tensor
from tfcluster.runtime.tensors import as_tensor, is_inexact, is_sparse

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
Adasum = ReduceOp.ADASUM


@unconverted
def allreduce(
    tensor: AGradient,
    average: bool | None = None,
    op: ReduceOp | None = None,
    name: str | None = None,
    compression: Compressor | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    sparse_as_dense: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> AGradient:
    """Combine a tensor, variable or IndexedSlices over all ranks, by default averaging.

    ``tensor`` has any shape, and a dtype of ``graph_ops.NUMBERS``: float16, bfloat16,
    float32, float64, integers of 8 to 64 bits, complex64, complex128 or bool. Shape and
    dtype must be the same on all ranks; the result has the same. Only the number of
    rows of IndexedSlices may differ, and the result has the rows of all ranks. It is
    bitwise identical on all ranks. Half precision is summed in float32; the average of
    integers is rounded down, but that of IndexedSlices has floats, as in Horovod; for
    booleans Sum and Max are "or", Min and Product "and". Values are multiplied by
    ``prescale_factor`` before and by ``postscale_factor`` afterwards; for integers in
    float64, rounded towards zero. ``sparse_as_dense`` converts IndexedSlices to a
    tensor first. The gradient of an average or sum is the same operation on the
    gradients.

    Raises ValueError if both ``average`` and ``op`` are given, if ``op`` is not a
    ReduceOp, for the gradient of an operation other than an average or a sum, and if
    this process is not in ``process_set``. Raises TypeError for other dtypes, for
    averages and factors of booleans, Adasum of anything but floats, and Min and Max of
    complex numbers. Raises NotImplementedError for IndexedSlices unless they are
    averaged or summed without factors, and for Adasum if the number of ranks is not a
    power of two; CollectiveMismatchError on all ranks if they differ, and another
    CollectiveError before ``init`` or if a rank is lost or late. In a graph, the op
    raises the errors of the exchange when it runs.

    Follows ``allreduce`` of horovod/tensorflow/__init__.py, whose ``device_dense``,
    ``device_sparse`` and ``ignore_name_scope`` have no effect here. Adasum is Maleki et
    al., arXiv:2006.02924.
    """
    what = f"allreduce of {name}" if name else "allreduce"
    results = _reduced(
        [tensor],
        what,
        ["tensor"],
        _reduction(
            chosen_op(average, op), compression, prescale_factor, postscale_factor
        ),
        sparse_as_dense=sparse_as_dense,
        among=process_set,
    )
    return cast(AGradient, results[0])


@unconverted
def grouped_allreduce(
    tensors: Sequence[AGradient],
    average: bool | None = None,
    op: ReduceOp | None = None,
    name: str | None = None,
    compression: Compressor | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    sparse_as_dense: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[AGradient]:
    """``allreduce`` each tensor of a list, all in one exchange.

    Returns a list of the same length and order. The arguments, shapes, dtypes and
    errors are as for ``allreduce``; the tensors may have different shapes and dtypes,
    but all ranks need the same list. Follows ``grouped_allreduce`` of
    horovod/tensorflow/__init__.py.
    """
    what = f"grouped allreduce of {name}" if name else "grouped allreduce"
    results = _reduced(
        tensors,
        what,
        [f"tensor {index}" for index in range(len(tensors))],
        _reduction(
            chosen_op(average, op), compression, prescale_factor, postscale_factor
        ),
        sparse_as_dense=sparse_as_dense,
        among=process_set,
    )
    return cast(list[AGradient], results)


def _reduction(
    op: ReduceOp, compression: Compressor | None, prescale: float, postscale: float
) -> Reduction:
    return Reduction(op, prescale, postscale, compression or Compression.none)


def _reduced(
    tensors: Sequence[Gradient],
    what: str,
    names: Sequence[str],
    reduction: Reduction,
    *,
    sparse_as_dense: bool,
    among: ProcessSet,
) -> list[Gradient]:
    chosen = [
        tensor if is_sparse(tensor) and not sparse_as_dense else as_tensor(tensor)
        for tensor in tensors
    ]
    factors = (reduction.prescale, reduction.postscale)
    if factors != (1.0, 1.0) and any(is_sparse(tensor) for tensor in chosen):
        raise NotImplementedError(f"{what}: IndexedSlices cannot be scaled")
    results = reduce_tensors(Exchange(what, reduction, among=among), chosen, names)
    reduced.note(results)
    return results


@unconverted
def reducescatter(
    tensor: Tensor,
    op: ReduceOp | None = None,
    name: str | None = None,
    compression: Compressor | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    device_dense: str = "",
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Combine the ranks' tensors, by default averaging, and return this rank's rows.

    ``tensor`` has shape (d, ...) and a dtype as in ``allreduce``; shape and dtype must
    be the same on all ranks. The d rows are divided in rank order: each rank gets ``d
    // size`` rows, the first ``d % size`` ranks one more. The result has that many
    rows, and the tensor's other dimensions and dtype. Dtypes and factors are treated as
    in ``allreduce``. The gradient is the all-gather of the ranks' gradients; for a sum
    it is multiplied by the number of ranks; other operations have none (ValueError).

    Raises ValueError for scalars and for Adasum, and what ``allreduce`` raises. Follows
    ``reducescatter`` of horovod/tensorflow/__init__.py.
    """
    what = f"reducescatter of {name}" if name else "reducescatter"
    reduction = _scattering(op, compression, prescale_factor, postscale_factor)
    return _reduced_parts([tensor], what, reduction, process_set)[0]


@unconverted
def grouped_reducescatter(
    tensors: Sequence[Tensor],
    op: ReduceOp | None = None,
    name: str | None = None,
    compression: Compressor | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    device_dense: str = "",
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """``reducescatter`` each tensor of a list, all in one exchange.

    Returns a list of the same length and order. Shapes, dtypes and errors are as for
    ``reducescatter``. Follows ``grouped_reducescatter`` of
    horovod/tensorflow/__init__.py.
    """
    what = f"grouped reducescatter of {name}" if name else "grouped reducescatter"
    reduction = _scattering(op, compression, prescale_factor, postscale_factor)
    return _reduced_parts(tensors, what, reduction, process_set)


def _scattering(
    op: ReduceOp | None,
    compression: Compressor | None,
    prescale: float,
    postscale: float,
) -> Reduction:
    if op is Adasum:
        raise ValueError("reducescatter cannot do Adasum: use allreduce")
    return _reduction(chosen_op(None, op), compression, prescale, postscale)


def _reduced_parts(
    tensors: Sequence[Tensor], what: str, reduction: Reduction, among: ProcessSet
) -> list[Tensor]:
    inputs = [as_tensor(tensor) for tensor in tensors]
    if any(tensor.shape.rank == 0 for tensor in inputs):
        raise ValueError(f"{what} takes tensors of at least one dimension")
    if not inputs:
        return []

    def forward(*flat: Tensor) -> tuple[list[Tensor], Callable[..., list[Gradient]]]:
        exchange = Exchange(what, reduction, differentiable=False, among=among)
        whole = reduce_tensors(exchange, flat, ["tensor"] * len(flat))
        results = [_own_rows(as_tensor(total), among) for total in whole]

        def backward(*upstream: Tensor | None) -> list[Gradient]:
            if reduction.op not in (Average, Sum):
                raise ValueError(f"{reduction.words(what)} has no gradient")
            used = [
                tf.zeros_like(result) if gradient is None else gradient
                for gradient, result in zip(upstream, results, strict=True)
                if is_inexact(result)
            ]
            copies = among.size() if reduction.op is Sum else 1
            factor = copies * reduction.prescale * reduction.postscale
            whole = iter(gather_tensors(used, f"gradient of {what}", among))
            return [
                scaled_by(next(whole), factor) if is_inexact(tensor) else None
                for tensor in flat
            ]

        return results, backward

    parts = with_gradients(forward, inputs)
    reduced.note(parts)
    return parts


def _own_rows(tensor: Tensor, among: ProcessSet) -> Tensor:
    """This rank's rows of a tensor that all ranks have."""
    rows, size, rank = tf.shape(tensor)[0], among.size(), among.rank()
    start, end = (
        number * (rows // size) + tf.minimum(number, rows % size)
        for number in (rank, rank + 1)
    )
    part = tensor[start:end]
    part.set_shape([None, *tensor.shape[1:]])
    return part
