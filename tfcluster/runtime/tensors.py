"""Converts eager tensors to arrays and back, without a copy if TensorFlow allows it.

Neither the tensor nor the array may be written to afterwards, because they may share
their memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.net.buffer_pool import ALIGNMENT
from tfcluster.runtime.tensor_types import (
    DType,
    Gradient,
    IndexedSlices,
    Tensor,
    Variable,
)

if TYPE_CHECKING:
    from typing_extensions import TypeIs

_SMALL_BYTES = 1 << 12
"""Smaller arrays are copied in a few microseconds."""


def as_tensor(value: Gradient) -> Tensor:
    """``value`` as a tensor; skips the slow convert_to_tensor if it already is one.

    TensorFlow determines shape and dtype; IndexedSlices become dense. Raises ValueError
    or TypeError for a value that TensorFlow cannot convert.
    """
    return value if isinstance(value, tf.Tensor) else tf.convert_to_tensor(value)


def is_sparse(value: Gradient) -> TypeIs[IndexedSlices]:
    """Whether a gradient is IndexedSlices."""
    return isinstance(value, tf.IndexedSlices)


def is_inexact(tensor: Tensor | Variable) -> bool:
    """Whether a tensor can have a gradient: its numbers are real or complex."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def name_of(variable: Any) -> str:
    """A variable's path (Keras), else its name (TensorFlow).

    Raises AttributeError for an eager tensor.
    """
    return str(getattr(variable, "path", None) or variable.name)


def array_of(tensor: Tensor) -> Array:
    """An eager tensor as an array; shares the tensor's memory if it is on the host.

    Shape and dtype stay; bfloat16 is the dtype of ml_dtypes.
    """
    # For a bfloat16 scalar, TensorFlow returns a number instead of an array.
    return np.asarray(tensor if tensor.ndim else tensor.numpy())


def tensor_of(array: Array, dtype: DType | None = None) -> Tensor:
    """The array as a tensor of ``dtype``, which takes over its memory if possible.

    The array must be contiguous, writeable, aligned to ``ALIGNMENT`` bytes and of that
    dtype (by default, its own); otherwise it is copied. The shape stays.
    """
    if dtype is not None and array.dtype != dtype.as_numpy_dtype:
        return tf.convert_to_tensor(array, dtype)
    fits = array.flags.c_contiguous and array.flags.writeable
    if not array.size or not fits or array.ctypes.data % ALIGNMENT:
        return tf.convert_to_tensor(array, dtype)
    if array.dtype == tf.bfloat16.as_numpy_dtype:
        # DLPack accepts only numpy's own dtypes.
        return tf.bitcast(tensor_of(array.view(np.uint16)), tf.bfloat16)
    try:
        capsule = array.__dlpack__()
    except (BufferError, TypeError):  # Another dtype that is not numpy's own.
        return tf.convert_to_tensor(array, dtype)
    return tf.experimental.dlpack.from_dlpack(capsule)


def tensor_of_part(part: Array) -> Tensor:
    """Like ``tensor_of``, for a part of a message; a small part is copied.

    Otherwise the tensor would keep the memory of the whole message in use.
    """
    if part.nbytes < _SMALL_BYTES:
        return tf.constant(part)
    return tensor_of(part)
