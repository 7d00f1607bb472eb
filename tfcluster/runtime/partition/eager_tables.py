"""Variables that stay divided by rows, as tables of embeddings do.

``EagerTables`` is what the script gets of them outside of functions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.divided_variables import (
    DividedVariable,
    DividedVariables,
    rows_of,
)
from tfcluster.runtime.tensor_types import Tensor


class EagerTables:
    """The methods of ``tf.Variable`` for divided variables, outside of functions."""

    def __init__(self, tables: DividedVariables) -> None:
        self._tables = tables

    def handler(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method of this class in place of one of ``tf.Variable``."""
        return partial(self._call, method)

    def _call(
        self,
        method: Callable[..., Any],
        original: Callable[..., Any],
        variable: Any,
        *args: Any,
        **keywords: Any,
    ) -> Any:
        table = self._tables.of(variable.handle) if tf.executing_eagerly() else None
        if table is None:
            return original(variable, *args, **keywords)
        return method(table, variable, *args, **keywords)

    def read(
        self, table: DividedVariable, variable: Any, *args: Any, **keywords: Any
    ) -> Tensor:
        """All rows, on each rank."""
        value = tf.constant(self._tables.value(table))
        tf_functions.record_read(variable, value)
        return value

    def gather(
        self, table: DividedVariable, variable: Any, indices: Any, **keywords: Any
    ) -> Tensor:
        """The rows that indices name."""
        rows: Tensor = tf.gather(variable.value(), indices)
        return rows

    def assign(
        self,
        table: DividedVariable,
        variable: Any,
        value: Any,
        *args: Any,
        **keywords: Any,
    ) -> Any:
        """Set this rank's rows."""
        value = tf.convert_to_tensor(value, table.dtype)
        if tuple(value.shape) != table.shape:
            raise ValueError(
                f"{table.name} has the shape {table.shape}, and the value that is "
                f"assigned {tuple(value.shape)}"
            )
        self._tables.assign(table, partial(rows_of, value))
        return variable

    def update(
        self,
        name: str,
        table: DividedVariable,
        variable: Any,
        value: Any,
        *args: Any,
        **keywords: Any,
    ) -> Any:
        """Call a method of the piece with this rank's rows of a value."""
        for split, piece in zip(self._tables.ranks.splits, table.pieces, strict=True):
            first, count = split.first(table.shape[0]), split.count(table.shape[0])
            if isinstance(value, tf.IndexedSlices):
                own = value.indices - first
                is_own = (own >= 0) & (own < count)
                rows = tf.boolean_mask(value.values, is_own)
                part: Any = tf.IndexedSlices(rows, tf.boolean_mask(own, is_own))
            else:
                part = tf.convert_to_tensor(value, table.dtype)[first : first + count]
            getattr(piece, name)(part)
        return variable
