"""The variables of which every rank holds its rows, and no others.

A divided variable has a ``tf.Variable`` by which the script names it, and which holds
no rows, and a piece for each rank of this process: a ``tf.Variable`` with the rank's
rows. Programs get the handles of the pieces. What else may use the variable is in
``eager_tables`` and ``optimizer_slots``; any other use gets an error from TensorFlow.
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
from tfcluster.runtime.collective.collectives import broadcast_bytes
from tfcluster.runtime.errors import CollectiveError
from tfcluster.runtime.partition.host_rows import gathered
from tfcluster.runtime.partition.placement import Ranks, Shard
from tfcluster.runtime.partition.variables import Watched
from tfcluster.runtime.tensor_types import Array, DType, Tensor

CHUNK_BYTES = 4 << 20
"""Rows are made, sent and saved in chunks of about this size."""
_CHIEF = 0


@dataclass(eq=False)
class DividedVariable:
    """A divided variable."""

    name: str
    """Equal on all ranks."""
    shape: tuple[int, ...]
    shard: Shard
    """Its rows are successive entries of one dimension."""
    pieces: Sequence[Any]
    """The ``tf.Variable`` of each rank of this process."""
    number: int
    """How many there were before it. Equal on all ranks."""
    is_slot: bool
    """Whether it becomes whole when it is used; see ``optimizer_slots``."""

    @property
    def dtype(self) -> DType:
        dtype: DType = self.pieces[0].dtype
        return dtype

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
        rows = self.shard.rows
        step = max(1, nbytes * rows // max(self.nbytes, 1))
        end = rows if end is None else end
        return pairwise([first, *range(first - first % step + step, end, step), end])


class DividedVariables:
    """The divided variables of this process, by their handles.

    Every rank has the same ones. ``group`` connects the processes; None if this process
    has all ranks. ``warn`` is called on all ranks with a text. Weights that are larger
    than ``limit``, in bytes, are to be divided.
    """

    def __init__(
        self,
        ranks: Ranks,
        group: Group | None = None,
        warn: Callable[[str], None] = lambda text: None,
        limit: int | None = None,
    ) -> None:
        self.ranks = ranks
        self.limit = limit
        self._group = group
        self._warn = warn
        self._entries: dict[int, tuple[weakref.ref[Tensor], DividedVariable]] = {}
        """By the ``id`` of a handle, with a reference that ends the entry."""
        self._count = 0
        self._is_leading = False

    def of(self, handle: Tensor) -> DividedVariable | None:
        """The divided variable with this handle, if it is one."""
        entry = self._entries.get(id(handle))
        return None if entry is None else entry[1]

    def is_divided(self, handle: Tensor) -> bool:
        """Whether each rank holds only its rows of the variable with this handle."""
        return id(handle) in self._entries

    def has_shape(self, shape: Sequence[int]) -> bool:
        """Whether a divided variable has this shape."""
        return any(each.shape == tuple(shape) for each in self._all())

    def slots(self) -> list[Tensor]:
        """The handles of those that become whole when they are used."""
        slots = [ref() for ref, each in self._entries.values() if each.is_slot]
        return [handle for handle in slots if handle is not None]

    def add(
        self,
        name: str,
        handle: Tensor,
        shape: Sequence[int],
        shard: Shard,
        pieces: Sequence[Any],
        *,
        is_slot: bool = False,
    ) -> DividedVariable:
        """Note that the variable with this handle is divided into these pieces.

        All ranks must call this in the same order.
        """
        number, self._count = self._count, self._count + 1
        divided = DividedVariable(name, tuple(shape), shard, pieces, number, is_slot)
        key, entries = id(handle), self._entries
        entries[key] = weakref.ref(handle, lambda _: entries.pop(key, None)), divided
        return divided

    def remove(self, handle: Tensor) -> None:
        """Note that the variable is whole again."""
        del self._entries[id(handle)]

    def _all(self) -> list[DividedVariable]:
        return [each for _, each in list(self._entries.values())]

    # --- rows -------------------------------------------------------------------------

    def rows(self, divided: DividedVariable, first: int, end: int) -> Array:
        """These rows of a divided variable.

        All ranks must call this, unless they ``serve``. Raises what ``Group.exchange``
        raises.
        """
        dim, sizes = divided.shard.dim, list(divided.shape)
        sizes[dim] = end - first
        result = np.empty(sizes, divided.dtype.as_numpy_dtype)
        by_rows = np.moveaxis(result, dim, 0)
        for start, stop in divided.chunks(first, end):
            if self._is_leading:
                self._send([divided.number, start, stop])
            rows = self._gathered(divided, start, stop)
            by_rows[start - first : stop - first] = np.moveaxis(rows, dim, 0)
        return result

    def value(self, divided: DividedVariable) -> Array:
        """The whole value, as ``rows``."""
        return self.rows(divided, 0, divided.shard.rows)

    def assign(
        self,
        divided: DividedVariable,
        rows_of: Callable[[int, int], Any],
        nbytes: int = CHUNK_BYTES,
    ) -> None:
        """Set this process's rows to what ``rows_of`` returns for a first and an end.

        It is called for chunks of about this size. No rank waits for another.
        """
        shard = divided.shard
        for split, piece in zip(self.ranks.splits, divided.pieces, strict=True):
            first = split.first(shard.rows)
            end = first + split.count(shard.rows)
            for start, stop in divided.chunks(first, end, nbytes):
                rows = tf.cast(rows_of(start, stop), divided.dtype)
                set_rows(piece, start - first, rows, shard.dim)
            read_in_place(piece)

    def _gathered(self, divided: DividedVariable, first: int, end: int) -> Array:
        dim, parts = divided.shard.dim, []
        for split, piece in zip(self.ranks.splits, divided.pieces, strict=True):
            own = split.first(divided.shard.rows)
            count = split.count(divided.shard.rows)
            begin, stop = (min(max(at - own, 0), count) for at in (first, end))
            read_in_place(piece)
            value = tf.raw_ops.ReadVariableOp(resource=piece.handle, dtype=piece.dtype)
            parts.append(np.asarray(rows_of(value, begin, stop, dim)))
        part = np.concatenate(parts, dim) if len(parts) > 1 else parts[0]
        if self._group is None or not self.ranks.exchanges:
            return part
        with self._group.exchange(Signature(f"rows of {divided.name}")) as call:
            return gathered(call.transport, part, Shard(dim, end - first))

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
            chosen = next(each for each in self._all() if each.number == number)
            self._gathered(chosen, first, end)

    def _send(self, wanted: list[int] | None) -> list[int] | None:
        """What the chief sends to all."""
        assert self._group is not None
        signature = Signature("rows that the chief reads")
        data = broadcast_bytes(
            self._group, json.dumps(wanted).encode(), _CHIEF, signature
        )
        received: list[int] | None = json.loads(data)
        return received

    # --- what needs whole variables ---------------------------------------------------

    def exceeds_limit(self, shape: Sequence[int | None], dtype: DType) -> bool:
        """Whether a variable is large, and may have rows."""
        if self.limit is None or len(shape) < 2:
            return False
        nbytes = math.prod(size or 0 for size in shape) * int(dtype.size)
        return nbytes > self.limit

    def refuse(self, inputs: Sequence[Tensor], name: str) -> None:
        """Raise CollectiveError if a call that is not divided needs all rows."""
        for divided in map(self.of, inputs):
            if divided is not None:
                raise CollectiveError(
                    f"{name} uses {divided.name}, of which each rank has its own rows, "
                    "where the ranks cannot exchange any: in a thread, within another "
                    "function, or while a model is saved. Call it in the program's "
                    "main thread, or raise runtime.shard_tables"
                )

    def note_undivided(self, variables: Sequence[Watched]) -> None:
        """Warn of variables among these that are large, and yet whole."""
        for variable in variables:
            is_whole = not self.is_divided(variable.handle)
            if is_whole and self.exceeds_limit(variable.shape, variable.dtype):
                self._warn(
                    f"{variable.name} is larger than runtime.shard_tables, but every "
                    "rank holds all of it: only weights of Keras that an initializer "
                    "makes, with a row for each rank, are divided. Use a layer such as "
                    "keras.layers.Embedding, or keras.Variable with an initializer and "
                    "a shape"
                )

    def note_whole(self, function: str, ops: Sequence[str]) -> None:
        """Warn that a function makes whole divided variables for these ops."""
        if ops:
            self._warn(
                f"{function} needs all rows of weights that are divided, so each rank "
                f"makes them whole in each call, for {', '.join(ops)}"
            )

    @contextmanager
    def made_whole(
        self, inputs: Sequence[Tensor], function: str
    ) -> Iterator[list[Tensor]]:
        """The inputs of a function that needs whole variables, and may change them.

        All ranks must call this.
        """
        found = {i: each for i, h in enumerate(inputs) if (each := self.of(h))}
        wholes: dict[int, Any] = {}
        tensors = list(inputs)
        for place, divided in found.items():
            self._warn(
                f"{function} cannot be divided, so each rank makes all rows of "
                f"{divided.name} for it ({divided.nbytes / 1e6:.0f} MB)"
            )
            wholes[place] = tf.Variable(self.value(divided), trainable=False)
            tensors[place] = wholes[place].handle
        yield tensors
        for place, whole in wholes.items():
            self.assign(found[place], partial(rows_of, whole.value()))


def rows_of(value: Tensor, first: int, end: int, dim: int = 0) -> Tensor:
    """Rows of a tensor, in new memory."""
    rank = len(tuple(value.shape))
    begin, size = [0] * rank, [-1] * rank
    begin[dim], size[dim] = first, end - first
    rows: Tensor = tf.slice(value, begin, size)
    return rows


def set_rows(variable: Any, first: int, rows: Tensor, dim: int = 0) -> None:
    """Set rows of a ``tf.Variable`` from ``first`` on, in its memory."""
    # To write ``variable[first:end].assign`` would read it, and so copy all of it.
    all_of_these = (1 << dim) - 1
    tf.raw_ops.ResourceStridedSliceAssign(
        ref=variable.handle,
        begin=[0] * dim + [first],
        end=[0] * dim + [first + int(rows.shape[dim])],
        strides=[1] * (dim + 1),
        value=rows,
        begin_mask=all_of_these,
        end_mask=all_of_these,
    )


def read_in_place(variable: Any) -> None:
    """Let reads return the memory of a variable of which some rows were read or set."""
    tf.raw_ops.DisableCopyOnRead(resource=variable.handle)
