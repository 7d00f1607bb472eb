"""Variables that stay divided by rows, as tables of embeddings do.

``EagerTables`` is what the script gets of them outside of functions: all rows, whatever
reads them, and changes of each rank's own rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import new_class
from typing import Any

import tensorflow as tf

from tfcluster.runtime import tf_internals, tf_patches
from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.divided_variables import (
    DividedVariable,
    DividedVariables,
    rows_of,
)
from tfcluster.runtime.tensor_types import Tensor

_UPDATES = (
    *("assign_add", "assign_sub", "scatter_add", "scatter_sub", "scatter_update"),
    *("scatter_mul", "scatter_div", "scatter_max", "scatter_min"),
)
"""What a rank does with its own rows."""
_WHOLE_UPDATES = (
    *("scatter_nd_add", "scatter_nd_sub", "scatter_nd_update", "scatter_nd_max"),
    *("scatter_nd_min", "batch_scatter_update", "_strided_slice_assign"),
)
"""What each rank does with all rows, to keep its own."""


class EagerTables:
    """The methods of ``tf.Variable`` for divided variables, outside of functions."""

    def __init__(self, tables: DividedVariables) -> None:
        self._tables = tables
        self._classes: dict[type, type] = {}

    def replace_methods(self, variable: Any) -> None:
        """Let a variable have these methods; its class is derived from its own."""
        kind = type(variable)
        derived = self._classes.get(kind)
        if derived is None:
            methods: dict[str, Callable[..., Any]] = {
                "_read_variable_op": self.read,
                "sparse_read": self.gather,
                "gather_nd": self.gather_nd,
                "assign": self.assign,
                **{name: functools.partial(self.update, name) for name in _UPDATES},
                **{
                    name: functools.partial(self.update_whole, name)
                    for name in _WHOLE_UPDATES
                },
            }
            body: dict[str, Any] = {
                name: self._override(method, getattr(kind, name))
                for name, method in methods.items()
            }
            body |= tf_functions.handles_of_empty(self._tables.is_divided)
            derived = new_class(
                kind.__name__, (kind,), exec_body=lambda own: own.update(body)
            )
            self._classes[kind] = derived
        tf_patches.TABLE.replace(tf_patches.VARIABLE_CLASS, variable, derived)

    def _override(
        self, method: Callable[..., Any], original: Callable[..., Any]
    ) -> Callable[..., Any]:
        """A method of a derived class."""

        @functools.wraps(original)
        def override(variable: Any, *args: Any, **keywords: Any) -> Any:
            table = self._tables.of(variable.handle) if tf.executing_eagerly() else None
            if table is None:
                return original(variable, *args, **keywords)
            return method(table, variable, *args, **keywords)

        return override

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

    def gather_nd(
        self, table: DividedVariable, variable: Any, indices: Any, **keywords: Any
    ) -> Tensor:
        """The slices that indices name."""
        slices: Tensor = tf.gather_nd(variable.value(), indices)
        return slices

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
        self._tables.assign(table, functools.partial(rows_of, value))
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

    def update_whole(
        self,
        method: str,
        table: DividedVariable,
        variable: Any,
        /,
        *args: Any,
        **keywords: Any,
    ) -> Any:
        """Call a method of a variable with all rows, and keep this rank's."""
        with tf.variable_creator_scope(tf_internals.plain_variable):
            whole = tf.Variable(self._tables.value(table), trainable=False)
        getattr(whole, method)(*args, **keywords)
        return self.assign(table, variable, whole.value())
