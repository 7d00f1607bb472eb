"""Variables that are divided by rows: every rank holds its own rows, and no others.

A divided variable has a ``tf.Variable`` by which the program names it, and which holds
no rows, and a piece for each rank of this process: a ``tf.Variable`` with the rank's
rows. Programs get the handles of the pieces. Whatever else uses the variable gets an
error from TensorFlow, unless it is one of the methods of ``EagerTables``.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import Group, Signature
from tfcluster.runtime.collective.collectives import allgather_bytes, broadcast_bytes
from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.placement import Ranks, Shard
from tfcluster.runtime.tensor_types import Array, DType, Tensor

CHUNK_BYTES = 4 << 20
"""Rows are made, sent and saved in chunks of about this size."""
_CHIEF = 0


@dataclass(eq=False)
class DividedTable:
    """A divided variable."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    pieces: Sequence[Any]
    """The ``tf.Variable`` of each rank of this process."""
    number: int
    """How many there were before it. Equal on all ranks."""

    @property
    def shard(self) -> Shard:
        return Shard(0, self.shape[0])

    @property
    def handles(self) -> list[Tensor]:
        """The handles of the pieces."""
        return [piece.handle for piece in self.pieces]

    @property
    def nbytes(self) -> int:
        """The size of the whole variable."""
        return math.prod(self.shape) * int(self.dtype.size)

    def chunks(
        self, first: int = 0, end: int | None = None, nbytes: int = CHUNK_BYTES
    ) -> Iterator[tuple[int, int]]:
        """The bounds of rows, in chunks of about this size.

        They are the same for all rows and for some, but for the first and the last.
        """
        rows = self.shape[0]
        step = max(1, nbytes * rows // max(self.nbytes, 1))
        end = rows if end is None else end
        return pairwise([first, *range(first - first % step + step, end, step), end])


class Tables:
    """The divided variables of this process, by their handles.

    ``group`` connects the processes; None if this process has all ranks. ``warn`` is
    called on all ranks with a text.
    """

    def __init__(
        self,
        ranks: Ranks,
        group: Group | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.ranks = ranks
        self._group = group
        self._warn = warn
        self._tables: dict[int, tuple[object, DividedTable]] = {}
        """By the ``id`` of a handle, with a reference that ends the entry."""
        self._count = 0
        self._is_leading = False
        self._is_saving = False

    def of(self, handle: Tensor) -> DividedTable | None:
        """The divided variable with this handle, if it is one."""
        entry = self._tables.get(id(handle))
        return None if entry is None else entry[1]

    def has_shape(self, shape: Sequence[int]) -> bool:
        """Whether a divided variable has this shape."""
        tables = list(self._tables.values())
        return any(table.shape == tuple(shape) for _, table in tables)

    def add(
        self, name: str, handle: Tensor, shape: Sequence[int], pieces: Sequence[Any]
    ) -> DividedTable:
        """Note that the variable with this handle is divided into these pieces.

        All ranks must call this in the same order.
        """
        table = DividedTable(name, tuple(shape), pieces[0].dtype, pieces, self._count)
        self._count += 1
        key, tables = id(handle), self._tables
        tables[key] = weakref.ref(handle, lambda _: tables.pop(key, None)), table
        return table

    # --- rows -------------------------------------------------------------------------

    def rows(self, table: DividedTable, first: int, end: int) -> Array:
        """These rows of a divided variable.

        All ranks must call this, unless they ``serve``. Raises what ``Group.exchange``
        raises.
        """
        rows = np.empty((end - first, *table.shape[1:]), table.dtype.as_numpy_dtype)
        for start, stop in table.chunks(first, end):
            if self._is_leading:
                self._send([table.number, start, stop])
            rows[start - first : stop - first] = self._gathered(table, start, stop)
        return rows

    def value(self, table: DividedTable) -> Array:
        """The whole value, as ``rows``."""
        return self.rows(table, 0, table.shape[0])

    def assign(
        self,
        table: DividedTable,
        rows_of: Callable[[int, int], Any],
        nbytes: int = CHUNK_BYTES,
    ) -> None:
        """Set this process's rows to what ``rows_of`` returns for a first and an end.

        It is called for chunks of about this size. No rank waits for another.
        """
        for split, piece in zip(self.ranks.splits, table.pieces, strict=True):
            first = split.first(table.shape[0])
            end = first + split.count(table.shape[0])
            for start, stop in table.chunks(first, end, nbytes):
                rows = tf.cast(rows_of(start, stop), table.dtype)
                set_rows(piece, start - first, rows)
            read_in_place(piece)

    def _gathered(self, table: DividedTable, first: int, end: int) -> Array:
        dtype = table.dtype.as_numpy_dtype
        own = b"".join(
            _read_rows(piece, begin, stop).tobytes()
            for piece, (begin, stop) in zip(
                table.pieces, self._overlaps(table, first, end), strict=True
            )
        )
        parts = [own]
        if self._group is not None and self.ranks.exchanges:
            signature = Signature(f"rows of {table.name}")
            parts = allgather_bytes(self._group, own, signature)
        return np.frombuffer(b"".join(parts), dtype).reshape(-1, *table.shape[1:])

    def _overlaps(
        self, table: DividedTable, first: int, end: int
    ) -> Iterator[tuple[int, int]]:
        for split in self.ranks.splits:
            before, count = split.first(table.shape[0]), split.count(table.shape[0])
            bounds = first - before, end - before
            begin, stop = (min(max(bound, 0), count) for bound in bounds)
            yield begin, stop

    # --- one rank reads ---------------------------------------------------------------

    @contextmanager
    def leading(self) -> Iterator[None]:
        """A context in which the chief alone may read rows, as when it saves a model.

        All others must call ``serve``.
        """
        if not self._count or not self.ranks.exchanges:
            yield
            return
        self._is_leading = True
        try:
            yield
        finally:
            self._is_leading = False
            self._send(None)

    def serve(self) -> None:
        """Give the chief the rows that it reads, until its ``leading`` ends."""
        while self._count and self.ranks.exchanges:
            wanted = self._send(None)
            if wanted is None:
                return
            number, first, end = wanted
            tables = (table for _, table in list(self._tables.values()))
            self._gathered(next(t for t in tables if t.number == number), first, end)

    def _send(self, wanted: list[int] | None) -> list[int] | None:
        """What the chief sends to all."""
        assert self._group is not None
        signature = Signature("rows that the chief reads")
        data = broadcast_bytes(
            self._group, json.dumps(wanted).encode(), _CHIEF, signature
        )
        received: list[int] | None = json.loads(data)
        return received

    # --- what needs whole variables -----------------------------------------------

    def note_whole(self, function: str, ops: Sequence[str]) -> None:
        """Warn that a function makes whole divided variables for these ops."""
        if ops:
            self._warn(
                f"{function} needs all rows of weights that are divided, so each rank "
                f"makes them whole in each call, for the ops {', '.join(ops[:3])}"
            )

    @contextmanager
    def made_whole(
        self, inputs: Sequence[Tensor], function: str
    ) -> Iterator[list[Tensor]]:
        """The inputs of a function that needs whole variables, and may change them.

        All ranks must call this.
        """
        tables = {i: t for i, h in enumerate(inputs) if (t := self.of(h)) is not None}
        wholes: dict[int, Any] = {}
        tensors = list(inputs)
        for place, table in tables.items():
            self._warn(
                f"{function} cannot be divided, so each rank makes all rows of "
                f"{table.name} for it ({table.nbytes / 1e6:.0f} MB)"
            )
            wholes[place] = tf.Variable(self.value(table), trainable=False)
            tensors[place] = wholes[place].handle
        yield tensors
        for place, whole in wholes.items():
            self.assign(tables[place], partial(_rows_of, whole.value()))


def set_rows(variable: Any, first: int, rows: Tensor) -> None:
    """Set rows of a ``tf.Variable`` from ``first`` on, in its memory."""
    # To write ``variable[first:end].assign`` would read it, and so copy all of it.
    end = first + int(rows.shape[0])
    tf.raw_ops.ResourceStridedSliceAssign(
        ref=variable.handle, begin=[first], end=[end], strides=[1], value=rows
    )


def _read_rows(variable: Any, begin: int, end: int) -> Array:
    """Rows of a ``tf.Variable``, without a copy of all of them."""
    rows = tf.raw_ops.ResourceGather(
        resource=variable.handle, indices=tf.range(begin, end), dtype=variable.dtype
    )
    read_in_place(variable)
    return np.asarray(rows)


def read_in_place(variable: Any) -> None:
    """Let reads return the memory of a variable of which some rows were read or set."""
    tf.raw_ops.DisableCopyOnRead(resource=variable.handle)


def _rows_of(value: Tensor, first: int, end: int) -> Tensor:
    rows: Tensor = value[first:end]
    return rows


class EagerTables:
    """The methods of ``tf.Variable`` for divided variables, outside of functions."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def _table(self, variable: Any) -> DividedTable | None:
        return self._tables.of(variable.handle) if tf.executing_eagerly() else None

    def read(self, original: Callable[..., Any], variable: Any, *args: Any) -> Any:
        """All rows, on each rank."""
        table = self._table(variable)
        if table is None:
            return original(variable, *args)
        value = tf.constant(self._tables.value(table))
        tf_functions.record_read(variable, value)
        return value

    def gather(
        self, original: Callable[..., Any], variable: Any, indices: Any, **keywords: Any
    ) -> Any:
        """The rows that indices name."""
        if self._table(variable) is None:
            return original(variable, indices, **keywords)
        return tf.gather(variable.value(), indices)

    def assign(
        self,
        original: Callable[..., Any],
        variable: Any,
        value: Any,
        *args: Any,
        **keywords: Any,
    ) -> Any:
        """Set this rank's rows."""
        table = self._table(variable)
        if table is None:
            return original(variable, value, *args, **keywords)
        value = tf.convert_to_tensor(value, table.dtype)
        if tuple(value.shape) != table.shape:
            raise ValueError(
                f"{table.name} has the shape {table.shape}, and the value that is "
                f"assigned {tuple(value.shape)}"
            )
        self._tables.assign(table, partial(_rows_of, value))
        return variable

    def update(
        self,
        method: str,
        original: Callable[..., Any],
        variable: Any,
        value: Any,
        *args: Any,
        **keywords: Any,
    ) -> Any:
        """Call a method of the piece with this rank's rows of a value."""
        table = self._table(variable)
        if table is None:
            return original(variable, value, *args, **keywords)
        for split, piece in zip(self._tables.ranks.splits, table.pieces, strict=True):
            first, count = split.first(table.shape[0]), split.count(table.shape[0])
            if isinstance(value, tf.IndexedSlices):
                own = value.indices - first
                is_own = (own >= 0) & (own < count)
                rows = tf.boolean_mask(value.values, is_own)
                part: Any = tf.IndexedSlices(rows, tf.boolean_mask(own, is_own))
            else:
                part = tf.convert_to_tensor(value, table.dtype)[first : first + count]
            getattr(piece, method)(part)
        return variable
