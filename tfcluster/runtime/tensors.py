"""Tensors as arrays and back, without a copy where TensorFlow allows it; eager ones.

Both are read-only to everyone: who has a tensor may have its array, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective.buffer_pool import ALIGNMENT
from tfcluster.runtime.collective.transports.base import Array


def as_tensor(value: Any) -> Any:
    """``value``, converted if it is no tensor yet: to ask TensorFlow takes long."""
    return value if isinstance(value, tf.Tensor) else tf.convert_to_tensor(value)


def is_sparse(value: Any) -> bool:
    """Whether a gradient is IndexedSlices."""
    return isinstance(value, tf.IndexedSlices)


def is_inexact(tensor: Any) -> bool:
    """Whether a tensor can have a gradient: its numbers are real or complex."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def name_of(variable: Any) -> str:
    """A variable's path (Keras), else its name (TensorFlow)."""
    return str(getattr(variable, "path", None) or variable.name)


def array_of(tensor: Any) -> Array:
    """An eager tensor's values: its own memory, where that is the host's."""
    # TensorFlow makes no array of a scalar of bfloat16, only a number.
    return np.asarray(tensor if tensor.ndim else tensor.numpy())


def tensor_of(array: Array, dtype: Any) -> Any:
    """A tensor of that dtype, to which the array's memory belongs from now on."""
    fits = array.flags.c_contiguous and array.flags.writeable
    same = array.dtype == dtype.as_numpy_dtype
    empty = not array.size
    if empty or not fits or not same or array.ctypes.data % ALIGNMENT:
        return tf.convert_to_tensor(array, dtype)
    try:
        capsule = array.__dlpack__()
    except (BufferError, TypeError):  # numpy does not know the dtype by itself
        return tf.convert_to_tensor(array, dtype)
    return tf.experimental.dlpack.from_dlpack(capsule)
