"""A random op that keeps its state while the functions that use it are traced again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.tensor_types import Tensor


class PersistentOp:
    """An op that is traced once, in its own function.

    Graphs call that function eagerly. Otherwise it would become a part of each graph,
    with a state that starts from the beginning. So there is no gradient.
    """

    def __init__(self, draw: Callable[..., Any], dtypes: Any) -> None:
        """``dtypes`` has the dtype of ``draw``'s result, or of each of its results."""
        self._draw = draw
        self._dtypes = dtypes
        self._function: Callable[..., Any] | None = None

    def __call__(self, *inputs: Tensor) -> Any:
        """The result of ``draw``, in a graph; its shape is unknown.

        The inputs must have the dtypes and ranks that they had in the first call.
        """
        if self._function is None:
            specs = [
                tf.TensorSpec([None] * len(each.shape), each.dtype) for each in inputs
            ]
            self._function = tf.function(
                self._draw, input_signature=specs, autograph=False
            )
        function = self._function

        def run(*arrays: Array) -> Sequence[Array]:
            found = function(*map(tf.constant, arrays))
            return [each.numpy() for each in tf.nest.flatten(found)]

        found = tf.numpy_function(run, inputs, tf.nest.flatten(self._dtypes))
        return tf.nest.pack_sequence_as(self._dtypes, found)
