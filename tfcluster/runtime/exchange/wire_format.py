"""How tensors are sent: scaled, compressed, and in dtypes that can be combined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfcluster.runtime.collective import ReduceOp
from tfcluster.runtime.exchange.compression import Compression, Compressor
from tfcluster.runtime.exchange.graph_ops import require_numbers
from tfcluster.runtime.tensor_types import Tensor

_HALVES = (tf.float16, tf.bfloat16)


@dataclass(frozen=True, slots=True)
class Reduction:
    """How tensors are combined: ``postscale * op(prescale * x)``."""

    op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0
    compression: Compressor = Compression.none

    def words(self, what: str) -> str:
        """The operation in a signature: ``allreduce (sum) of weights``."""
        factors = (self.prescale, self.postscale)
        scaled = "" if factors == (1.0, 1.0) else f", scaled by {factors}"
        verb, of, name = what.partition(" of ")
        return f"{verb} ({self.op.value}{scaled}){of}{name}"


def chosen_op(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """The operation for Horovod's arguments ``average`` and ``op``; default: average.

    Raises ValueError if both are given.
    """
    if average is not None and op is not None:
        raise ValueError("give either average or op, not both")
    if op is not None:
        if not isinstance(op, ReduceOp):
            raise ValueError(
                f"op is {op!r}: it can be Average, Sum, Adasum, Min, Max or Product"
            )
        return op
    return ReduceOp.SUM if average is False else ReduceOp.AVERAGE


@dataclass(frozen=True, slots=True)
class Carrier:
    """A tensor as it is sent; ``restored`` undoes the change on the result."""

    tensor: Tensor
    restored: Callable[[Any], Any]
    words: str
    """The dtype in a signature."""


def uncompressed(tensor: Tensor) -> Carrier:
    """Send ``tensor`` as it is."""
    return Carrier(tensor, lambda result: result, tensor.dtype.name)


def widened(tensor: Tensor) -> Carrier:
    """Send ``tensor`` as it is, but half precision as float32, as sums need it."""
    dtype = tensor.dtype
    if dtype not in _HALVES:
        return uncompressed(tensor)
    return Carrier(
        tf.cast(tensor, tf.float32), lambda result: tf.cast(result, dtype), dtype.name
    )


def carrier(tensor: Tensor, reduction: Reduction, what: str) -> Carrier:
    """Prepare ``tensor`` for ``reduction``: scale and compress it.

    Raises TypeError if the operation does not support its dtype.
    """
    _require(tensor, reduction, what)
    dtype = tensor.dtype
    if dtype == tf.bool:
        # A sum counts the true values; cast back to bool, it is an "or".
        sent = tf.int32 if reduction.op is ReduceOp.SUM else tf.uint8
        return Carrier(
            tf.cast(tensor, sent), lambda result: tf.cast(result, tf.bool), dtype.name
        )
    scaled = scaled_by(tensor, reduction.prescale)
    small, context = reduction.compression.compress(scaled)

    def restored(result: Any) -> Any:
        whole = reduction.compression.decompress(result, context)
        return scaled_by(whole, reduction.postscale)

    same = small.dtype == dtype
    words = dtype.name if same else f"{dtype.name} as {small.dtype.name}"
    return Carrier(small, restored, words)


def scaled_by(tensor: Tensor, factor: float) -> Any:
    """``tensor`` times ``factor`` in its own dtype; integers round towards zero."""
    if factor == 1.0:
        return tensor
    dtype = tensor.dtype
    if dtype in _HALVES:
        return tf.cast(tf.cast(tensor, tf.float32) * factor, dtype)
    if dtype.is_integer:
        exact = tf.constant(factor, tf.float64)
        return tf.cast(tf.cast(tensor, tf.float64) * exact, dtype)
    # Not tf.cast, which would first round the factor to float32.
    return tensor * tf.constant(factor, dtype)


def _require(tensor: Tensor, reduction: Reduction, what: str) -> None:
    require_numbers(tensor, what)
    dtype, op = tensor.dtype, reduction.op
    if dtype == tf.bool:
        if op is ReduceOp.AVERAGE:
            raise TypeError(
                f"{what}: booleans have no average; op=Sum and op=Max mean 'or', "
                "op=Min and op=Product mean 'and'"
            )
        if (reduction.prescale, reduction.postscale) != (1.0, 1.0):
            raise TypeError(f"{what}: booleans cannot be scaled")
    if op is ReduceOp.ADASUM and not dtype.is_floating:
        raise TypeError(f"{what}: Adasum takes floating point numbers")
    if dtype.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise TypeError(f"{what}: complex numbers have no {op.value}")
