"""Gradient compression: ranks send rounded values, but sum them in float32."""

from __future__ import annotations

from typing import Any, Protocol

import tensorflow as tf

from tfcluster.runtime.tensor_types import Tensor


class Compressor(Protocol):
    """Makes a tensor smaller before an exchange and restores its dtype afterwards."""

    def compress(self, tensor: Tensor) -> tuple[Any, Any]:
        """Return the tensor to send, and the context that ``decompress`` needs."""
        ...

    def decompress(self, tensor: Tensor, context: Any) -> Any: ...


class NoCompression:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Any:
        return tensor


class _Rounded:
    """Casts floating-point tensors to a smaller dtype."""

    dtype: Any = None

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Any, Any]:
        dtype = tensor.dtype
        if not dtype.is_floating or dtype.size <= cls.dtype.size:
            return tensor, None
        return tf.cast(tensor, cls.dtype), dtype

    @classmethod
    def decompress(cls, tensor: Tensor, context: Any) -> Any:
        return tensor if context is None else tf.cast(tensor, context)


class FP16Compression(_Rounded):
    """Sends float32 and float64 as float16: 11 bits of precision, up to 65504."""

    dtype = tf.float16


class BF16Compression(_Rounded):
    """Sends float32 and float64 as bfloat16: 8 bits of precision, float32's range."""

    dtype = tf.bfloat16


class Compression:
    """The available compressors, by name."""

    none = NoCompression
    fp16 = FP16Compression
    bf16 = BF16Compression


def compression_named(name: str) -> Any:
    """The compressor for the option ``runtime.compression``: none, fp16 or bf16."""
    return getattr(Compression, name)
