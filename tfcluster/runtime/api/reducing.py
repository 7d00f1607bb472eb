"""allreduce, grouped_allreduce and reducescatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime.api.carriers import Reduction, carrier, chosen_op
from tfcluster.runtime.api.exchange import Exchange, reduce_tensors
from tfcluster.runtime.api.moving import gather_tensors
from tfcluster.runtime.api.ops import exchange_op, unconverted
from tfcluster.runtime.collective import Layout, ReduceOp, tensor_words
from tfcluster.runtime.collective.rows import reduced_part
from tfcluster.runtime.collective.transport import Array
from tfcluster.runtime.compression import Compression, Compressor
from tfcluster.runtime.tensors import as_tensor
from tfcluster.runtime.world import group, size

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


@unconverted
def allreduce(
    tensor: Any,
    average: bool | None = None,
    op: ReduceOp | None = None,
    name: str | None = None,
    compression: Compressor | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    sparse_as_dense: bool = False,
) -> Any:
    """A tensor, variable or IndexedSlices combined over all ranks; the average if
    nothing else is said.

    Shapes and dtypes are the same on all ranks (for IndexedSlices the numbers of rows
    may differ), and so is the result, bit by bit. Half precision is summed up in
    float32; the average of integers is rounded down; for booleans Sum and Max are
    "or", Min and Product "and". Values are multiplied by ``prescale_factor`` before and
    by ``postscale_factor`` afterwards. ``sparse_as_dense`` makes a tensor of
    IndexedSlices first. The gradient of an average or sum is the same operation on the
    gradients.

    Raises ValueError for ``average`` together with ``op``, TypeError for tensors that
    are no numbers and for averages of booleans, CollectiveMismatchError on all ranks
    where they differ.
    """
    what = f"allreduce of {name}" if name else "allreduce"
    return _reduced(
        [tensor],
        what,
        ["tensor"],
        Reduction(
            chosen_op(average, op),
            prescale_factor,
            postscale_factor,
            compression or Compression.none,
        ),
        sparse_as_dense=sparse_as_dense,
    )[0]


@unconverted
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    op: ReduceOp | None = None,
    name: str | None = None,
    compression: Compressor | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    sparse_as_dense: bool = False,
) -> list[Any]:
    """A list of tensors combined as ``allreduce`` does, all in one exchange."""
    what = f"grouped allreduce of {name}" if name else "grouped allreduce"
    return _reduced(
        tensors,
        what,
        [f"tensor {index}" for index in range(len(tensors))],
        Reduction(
            chosen_op(average, op),
            prescale_factor,
            postscale_factor,
            compression or Compression.none,
        ),
        sparse_as_dense=sparse_as_dense,
    )


def _reduced(
    tensors: Sequence[Any],
    what: str,
    names: Sequence[str],
    reduction: Reduction,
    *,
    sparse_as_dense: bool,
) -> list[Any]:
    chosen = [
        as_tensor(tensor)
        if sparse_as_dense or not isinstance(tensor, tf.IndexedSlices)
        else tensor
        for tensor in tensors
    ]
    return reduce_tensors(Exchange(what, reduction), chosen, names)


@unconverted
def reducescatter(
    tensor: Any,
    op: ReduceOp | None = None,
    name: str | None = None,
    compression: Compressor | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """This rank's rows of the ranks' tensors combined; by default averaged.

    Shapes and dtypes are the same on all ranks. The first dimension, of d rows, is
    divided: each rank gets ``d // size`` rows in rank order, the first ``d % size``
    ranks one more. Dtypes and factors are treated as by ``allreduce``. The gradient is
    made of the ranks' gradients, one after the other.

    Raises ValueError for scalars, and what ``allreduce`` raises.
    """
    reduction = Reduction(
        chosen_op(None, op),
        prescale_factor,
        postscale_factor,
        compression or Compression.none,
    )
    what = f"reducescatter of {name}" if name else "reducescatter"
    tensor = as_tensor(tensor)
    if tensor.shape.rank == 0:
        raise ValueError("reducescatter takes tensors of at least one dimension")
    if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
        return _scattered(tensor, what, reduction)

    def forward(tensor: Any) -> Any:
        def backward(upstream: Any) -> Any:
            if reduction.op not in (Average, Sum):
                raise ValueError(f"{reduction.words(what)} has no gradient")
            parts = 1.0 if reduction.op is Sum else 1.0 / size()
            factor = parts * reduction.prescale * reduction.postscale
            (whole,) = gather_tensors([upstream], f"gradient of {what}")
            return whole * tf.cast(factor, whole.dtype)

        return _scattered(tensor, what, reduction), backward

    return tf.custom_gradient(forward)(tensor)


def _scattered(tensor: Any, what: str, reduction: Reduction) -> Any:
    sent = carrier(tensor, reduction, what)

    def act(array: Array) -> list[Array]:
        words = tensor_words("tensor", sent.words, array.shape)
        layout = Layout(reduction.words(what), (words,))
        with group().exchange(layout) as turn:
            wide = array
            if reduction.op is Average and array.dtype.kind in "iu":
                wide = array.astype(np.uint64 if array.dtype.kind == "u" else np.int64)
            total = reduced_part(turn.transport, wide, reduction.op)
        if reduction.op is Average:
            ranks = total.dtype.type(group().size)
            total = total // ranks if total.dtype.kind in "iu" else total / ranks
        with np.errstate(over="ignore"):
            return [total.astype(array.dtype)]

    (result,) = exchange_op(act, [sent.tensor], [sent.tensor.dtype])
    result.set_shape([None, *tensor.shape[1:]])
    return sent.restored(result)
