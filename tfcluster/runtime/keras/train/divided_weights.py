"""Weights that are larger than a limit, such as tables of embeddings, are divided.

So are the variables that an optimizer has for them, which have the same shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime import tf_internals, tf_patches
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.tf_variables import new_variable
from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.divided_checkpoints import DividedCheckpoints
from tfcluster.runtime.partition.divided_variables import (
    CHUNK_BYTES,
    DividedVariable,
    DividedVariables,
    read_in_place,
    set_rows,
)
from tfcluster.runtime.partition.eager_tables import EagerTables
from tfcluster.runtime.partition.initial_rows import RowMaker
from tfcluster.runtime.partition.placement import Shard, Split
from tfcluster.runtime.tensor_types import Array, DType, Tensor


class DividedWeights:
    """Divides Keras's variables of two or more dimensions above ``tables.limit``.

    No function is divided in the context ``undivided()``. ``warn`` is called on all
    ranks with a text.
    """

    def __init__(
        self,
        tables: DividedVariables,
        *,
        undivided: Callable[[], AbstractContextManager[None]] = nullcontext,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._tables = tables
        self._eager = EagerTables(tables)
        self._undivided = undivided
        self._warn = warn

    def install(self) -> None:
        """Install the hooks in Keras and TensorFlow, once per process."""
        checkpoints = DividedCheckpoints(self._tables, self._table_of)
        tf_patches.TABLE.install(
            {tf_patches.CHECKPOINT_SAVER: checkpoints.without_tables}
        )
        patches.TABLE.install(
            {
                patches.VARIABLE_INITIALIZE: self._initialize,
                patches.STORE_ENTRY: self._store,
                patches.STORED_ENTRY: self._load,
                patches.VARIABLE_ASSIGN: self._assign,
                patches.STORE_IN_MEMORY: self._fits,
                patches.SAVE_OPTIMIZER: self._save_optimizer,
            }
        )

    def _initialize(
        self,
        original: Callable[[Any, Any], None],
        variable: Any,
        initializer: Callable[..., Any],
    ) -> None:
        """Create a variable's value, of which this process makes its rows only."""
        shape, dtype = tuple(variable.shape), tf.as_dtype(internals.dtype_of(variable))
        # An optimizer creates its variables while its first step is traced.
        with tf.init_scope():
            divides = tf.executing_eagerly() and self._divides(shape, dtype)
            if divides:
                self._create(variable, initializer, shape, dtype)
        if not divides:
            original(variable, initializer)

    def _create(
        self,
        variable: Any,
        initializer: Callable[..., Any],
        shape: tuple[int, ...],
        dtype: DType,
    ) -> None:
        with self._undivided():
            rows_of = self._rows_of(variable.path, initializer, shape, dtype)
            pieces = [
                _piece(rows_of, split, shape, dtype)
                for split in self._tables.ranks.splits
            ]
        with tf.variable_creator_scope(tf_internals.plain_variable):
            own = internals.initialize(variable, tf.zeros((0, *shape[1:]), dtype))
        tf_functions.set_shape(own, shape)
        shard = Shard(0, shape[0])
        self._tables.add(variable.path, own.handle, shape, shard, pieces)
        self._eager.replace_methods(own)

    def _divides(self, shape: tuple[int, ...], dtype: DType) -> bool:
        has_enough = bool(shape) and shape[0] >= self._tables.ranks.size
        return has_enough and self._tables.exceeds_limit(shape, dtype)

    def _rows_of(
        self,
        path: str,
        initializer: Callable[..., Any],
        shape: tuple[int, ...],
        dtype: DType,
    ) -> Callable[[Split], Tensor]:
        """A function that makes the rows of a rank."""
        reason = "it is no initializer of Keras"
        # Others may do at each call what they must do once.
        if internals.is_of_keras(type(initializer)):
            traced = tf.function(
                lambda: tf.convert_to_tensor(initializer(shape, dtype=dtype.name)),
                autograph=False,
            )
            try:
                return RowMaker(traced.get_concrete_function(), shape[0]).rows
            except NotImplementedError as error:
                reason = str(error)
        nbytes = math.prod(shape) * dtype.size
        if nbytes > CHUNK_BYTES:
            self._warn(
                f"each rank makes all rows of {path} at first ({nbytes / 1e6:.0f} MB): "
                f"its initializer cannot make some of them ({reason}). Keras's uniform "
                "and normal initializers and constants can"
            )
        whole = tf.convert_to_tensor(initializer(shape, dtype=dtype.name))

        def rows(split: Split) -> Tensor:
            first = split.first(shape[0])
            return whole[first : first + split.count(shape[0])]

        return rows

    # --- saving -----------------------------------------------------------------------

    def _store(
        self, original: Callable[..., None], store: Any, key: str, value: Any
    ) -> None:
        """Write a variable into a file of Keras's, a chunk of its rows at a time."""
        table = self._table_of(value)
        if table is None:
            original(store, key, value)
            return
        # Keras makes the group, and notes the dtype.
        original(store, key, np.zeros(0, table.dtype.as_numpy_dtype))
        group = internals.group_of(store)
        attributes = dict(group[key].attrs)
        dtype = group[key].dtype
        del group[key]
        entry = group.create_dataset(key, table.shape, dtype)
        entry.attrs.update(attributes)
        for first, end in table.chunks():
            entry[first:end] = self._tables.rows(table, first, end)

    def _load(self, original: Callable[..., Any], store: Any, key: str) -> Any:
        """An entry of a file of Keras's; of a divided weight, it is not read yet."""
        group = internals.group_of(store)
        # Keras refuses entries that are links to other files.
        is_own = type(group.get(key, getlink=True)).__name__ == "HardLink"
        entry = group[key] if is_own else None
        shape = getattr(entry, "shape", None)
        if entry is None or shape is None or not self._tables.has_shape(shape):
            return original(store, key)
        if entry.attrs or entry.is_virtual or entry.external:
            return original(store, key)
        return _StoredRows(entry)

    def _assign(
        self, original: Callable[[Any, Any], Any], variable: Any, value: Any
    ) -> Any:
        """Assign a value to a weight; of one that is stored, this rank's rows."""
        if not isinstance(value, _StoredRows):
            return original(variable, value)
        table = self._table_of(variable)
        if table is None or table.shape != value.shape:
            return original(variable, np.asarray(value))
        self._tables.assign(table, value.rows)
        return value

    def _fits(self, original: Callable[[Any], bool], model: Any) -> bool:
        """Whether a file is made in memory. Divided weights may not fit."""
        return not self._divided(model.variables) and original(model)

    def _save_optimizer(
        self, original: Callable[[Any, Any], None], optimizer: Any, store: Any
    ) -> None:
        """Give the store the variables, not their values."""
        if not self._divided(optimizer.variables):
            original(optimizer, store)
            return
        for number, variable in enumerate(optimizer.variables):
            store[str(number)] = variable

    def _divided(self, variables: Iterable[Any]) -> bool:
        return any(self._table_of(variable) is not None for variable in variables)

    def _table_of(self, value: Any) -> DividedVariable | None:
        if isinstance(value, keras.Variable):
            value = value.value
        is_variable = isinstance(value, tf.Variable)
        return self._tables.of(value.handle) if is_variable else None


class _StoredRows:
    """An array in a file, an ``h5py.Dataset``, of which rows are read when needed."""

    def __init__(self, entry: Any) -> None:
        self._entry = entry
        self.shape: tuple[int, ...] = tuple(entry.shape)
        self.dtype = entry.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self._entry[...], dtype)

    def rows(self, first: int, end: int) -> Array:
        return self._entry[first:end]


def _piece(
    rows_of: Callable[[Split], Tensor],
    split: Split,
    shape: tuple[int, ...],
    dtype: DType,
) -> Any:
    """A variable with the rows of a rank, which are made chunk by chunk."""
    count = split.count(shape[0])
    nbytes = count * math.prod(shape[1:]) * dtype.size
    chunks = max(1, min(count, nbytes // CHUNK_BYTES))
    # Memory that is not used before the rows are there.
    piece = new_variable(tf.raw_ops.Empty(shape=(count, *shape[1:]), dtype=dtype))
    for number in range(chunks):
        # As many ranks as there are chunks have the same rows.
        chunk = Split(split.rank * chunks + number, split.size * chunks)
        first = chunk.first(shape[0]) - split.first(shape[0])
        set_rows(piece, first, rows_of(chunk))
    read_in_place(piece)
    return piece
