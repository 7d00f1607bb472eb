"""Prepares tensors for sending: scaled, compressed, and in dtypes that can be combined.

Ranks send compressed gradients rounded, but sum them in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from tfcluster.runtime.collective import ReduceOp
from tfcluster.runtime.exchange.graph_ops import require_numbers
from tfcluster.runtime.tensor_types import DType, Tensor

_HALF_PRECISION = (tf.float16, tf.bfloat16)


class Compressor(Protocol):
    """Makes a tensor smaller before an exchange and restores its dtype afterwards."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, of equal shape, and a context for ``decompress``.

        The returned tensor's dtype must be one of ``graph_ops.NUMBERS``, and may depend
        only on the dtype of ``tensor``: ranks compare it.
        """

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        """Return a received tensor in the dtype that ``compress`` was given.

        Its shape stays.
        """


class NoCompression:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, None]:
        """``tensor`` itself, and no context."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, context: None) -> Tensor:
        """``tensor`` itself."""
        return tensor


class _Rounded:
    """Casts floating-point tensors to a smaller dtype."""

    dtype: DType

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, DType | None]:
        """``tensor`` in ``dtype``, and its own dtype to restore it.

        If its own dtype is not larger, returns ``tensor`` itself and None. Shapes stay.
        Values out of range become infinite.
        """
        dtype = tensor.dtype
        if not dtype.is_floating or dtype.size <= cls.dtype.size:
            return tensor, None
        return tf.cast(tensor, cls.dtype), dtype

    @classmethod
    def decompress(cls, tensor: Tensor, context: DType | None) -> Tensor:
        """``tensor`` in the dtype ``context``, or unchanged if ``context`` is None."""
        return tensor if context is None else tf.cast(tensor, context)


class FP16Compression(_Rounded):
    """Sends float32 and float64 as float16: 11 bits of precision, up to 65504."""

    dtype = tf.float16


class BF16Compression(_Rounded):
    """Sends float32 and float64 as bfloat16: 8 bits of precision, float32's range."""

    dtype = tf.bfloat16


class Compression:
    """The available compressors, by name.

    ``none`` sends tensors as they are, ``fp16`` and ``bf16`` send float32 and float64
    in two bytes and leave other dtypes alone. Follows
    horovod/tensorflow/compression.py, except that ranks sum in float32.
    """

    none = NoCompression
    fp16 = FP16Compression
    bf16 = BF16Compression


def compression_named(name: str) -> Compressor:
    """The compressor for the option ``runtime.compression``: none, fp16 or bf16.

    Raises AttributeError for any other name.
    """
    return getattr(Compression, name)


@dataclass(frozen=True, slots=True)
class Reduction:
    """How tensors are combined: ``postscale * op(prescale * x)``.

    ``compression`` is applied after ``prescale``, for sending, and undone before
    ``postscale``.
    """

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

    Raises ValueError if both are given, or if ``op`` is not a ReduceOp. Follows
    ``get_average_backwards_compatibility_fun`` of horovod/common/util.py.
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
class WireTensor:
    """A tensor as it is sent, with the shape of the original."""

    tensor: Tensor
    restored: Callable[[Tensor], Tensor]
    """Makes a tensor of the original dtype from the result."""
    words: str
    """The dtype in a signature."""


def to_wire(tensor: Tensor, reduction: Reduction, what: str) -> WireTensor:
    """Prepare ``tensor`` for ``reduction``: scale and compress it. Its shape stays.

    ``what`` names the exchange in messages. Booleans are sent as int32 or uint8. Raises
    TypeError if the operation does not support the dtype: see
    ``tfcluster.runtime.allreduce``.
    """
    dtype = tensor.dtype
    _require(dtype, reduction, what)
    if dtype == tf.bool:
        # A sum counts the true values; cast back to bool, it is an "or".
        sent = tf.int32 if reduction.op is ReduceOp.SUM else tf.uint8
        return WireTensor(
            tf.cast(tensor, sent), lambda result: tf.cast(result, tf.bool), dtype.name
        )
    scaled = scaled_by(tensor, reduction.prescale)
    compressed, context = reduction.compression.compress(scaled)

    def restored(result: Tensor) -> Tensor:
        decompressed = reduction.compression.decompress(result, context)
        return scaled_by(decompressed, reduction.postscale)

    same = compressed.dtype == dtype
    words = dtype.name if same else f"{dtype.name} as {compressed.dtype.name}"
    return WireTensor(compressed, restored, words)


def scaled_by(tensor: Tensor, factor: float) -> Tensor:
    """``tensor`` times ``factor`` in its own dtype; integers round towards zero."""
    if factor == 1.0:
        return tensor
    dtype = tensor.dtype
    if dtype in _HALF_PRECISION:
        return tf.cast(tf.cast(tensor, tf.float32) * factor, dtype)
    if dtype.is_integer:
        exact = tf.constant(factor, tf.float64)
        return tf.cast(tf.cast(tensor, tf.float64) * exact, dtype)
    # Not tf.cast, which would first round the factor to float32.
    return tensor * tf.constant(factor, dtype)


def _require(dtype: DType, reduction: Reduction, what: str) -> None:
    require_numbers(dtype, what)
    op = reduction.op
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
        raise TypeError(f"{what}: complex numbers do not support {op.value}")
