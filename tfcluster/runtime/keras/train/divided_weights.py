"""Weights that are larger than a limit, such as tables of embeddings, are divided.

So are the variables that an optimizer has for them, which have the same shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from tfcluster.runtime import tf_patches
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.tf_variables import new_variable
from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.tables import EagerTables, Tables


class DividedWeights:
    """Divides Keras's variables of two or more dimensions above ``limit`` bytes."""

    def __init__(self, tables: Tables, limit: int) -> None:
        self._tables = tables
        self._limit = limit

    def install(self) -> None:
        """Install the hooks in Keras and TensorFlow, once per process."""
        eager = EagerTables(self._tables)
        tf_patches.TABLE.install(
            {
                tf_patches.VARIABLE_READ: eager.read,
                tf_patches.VARIABLE_GATHER: eager.gather,
                tf_patches.VARIABLE_ASSIGN: eager.assign,
                **{
                    patch: partial(eager.update, patch.attribute)
                    for patch in tf_patches.VARIABLE_UPDATES
                },
            }
        )
        patches.TABLE.install({patches.VARIABLE_INITIALIZE: self._initialize})

    def _initialize(
        self,
        original: Callable[[Any, Any], None],
        variable: Any,
        initializer: Callable[..., Any],
    ) -> None:
        """Create a variable's value, of which this process gets its rows."""
        shape, dtype = tuple(variable.shape), tf.as_dtype(internals.dtype_of(variable))
        if not self._divides(shape, dtype) or not tf.executing_eagerly():
            original(variable, initializer)
            return
        value = tf.convert_to_tensor(initializer(shape, dtype=dtype.name))
        pieces = []
        for split in self._tables.ranks.splits:
            first, count = split.first(shape[0]), split.count(shape[0])
            pieces.append(new_variable(value[first : first + count]))
        own = internals.initialize(variable, tf.zeros((0, *shape[1:]), dtype))
        tf_functions.set_shape(own, shape)
        self._tables.add(variable.path, own.handle, shape, pieces)

    def _divides(self, shape: tuple[int, ...], dtype: Any) -> bool:
        return (
            len(shape) > 1
            and shape[0] >= self._tables.ranks.size
            and math.prod(shape) * dtype.size > self._limit
        )
