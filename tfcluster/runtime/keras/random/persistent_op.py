"""A random op that keeps its state while the functions that use it are traced again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.tensor_types import DType, Tensor


class PersistentOp:
    """An op with two inputs, which is traced once, in a function of its own.

    Graphs call that function eagerly, as it would otherwise become a part of each of
    them, with a state that begins anew. So there is no gradient.
    """

    def __init__(self, draw: Callable[[Tensor, Tensor], Tensor], dtype: DType) -> None:
        """``dtype`` is that of the result of ``draw``."""
        self._draw = draw
        self._dtype = dtype
        self._function: Callable[..., Any] | None = None

    def __call__(self, first: Tensor, second: Tensor) -> Tensor:
        """The result of ``draw``, in a graph; its shape is unknown.

        The inputs must have the dtypes and ranks that they had in the first call.
        """
        if self._function is None:
            specs = [
                tf.TensorSpec([None] * len(each.shape), each.dtype)
                for each in (first, second)
            ]
            self._function = tf.function(
                self._draw, input_signature=specs, autograph=False
            )
        function = self._function

        def run(*arrays: Array) -> Array:
            found: Array = function(*map(tf.constant, arrays)).numpy()
            return found

        drawn: Tensor = tf.numpy_function(run, [first, second], self._dtype)
        return drawn
