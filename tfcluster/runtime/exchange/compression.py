"""Gradients in fewer bytes: what ranks send is rounded, what they sum up is float32."""

from __future__ import annotations

from typing import Any, Protocol

import tensorflow as tf


class Compressor(Protocol):
    """Makes a tensor smaller before it is exchanged, and as it was afterwards."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """The tensor to be sent, and what ``decompress`` needs to know."""
        ...

    def decompress(self, tensor: Any, context: Any) -> Any: ...


class NoCompression:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        return tensor


class _Rounded:
    """Sends floating point tensors in another, smaller dtype."""

    dtype: Any = None

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        dtype = tensor.dtype
        if not dtype.is_floating or dtype.size <= cls.dtype.size:
            return tensor, None
        return tf.cast(tensor, cls.dtype), dtype

    @classmethod
    def decompress(cls, tensor: Any, context: Any) -> Any:
        return tensor if context is None else tf.cast(tensor, context)


class FP16Compression(_Rounded):
    """Sends float32 and float64 as float16: 11 bits of precision, up to 65504."""

    dtype = tf.float16


class BF16Compression(_Rounded):
    """Sends float32 and float64 as bfloat16: 8 bits of precision, float32's range."""

    dtype = tf.bfloat16


class Compression:
    """The compressors that there are, by name."""

    none = NoCompression
    fp16 = FP16Compression
    bf16 = BF16Compression


def compression_named(name: str) -> Any:
    """The compressor that ``runtime.compression`` names: none, fp16 or bf16."""
    return getattr(Compression, name)
