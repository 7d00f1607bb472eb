"""Which variables, or which rows, are on which ps; cuts and joins them. Pure.

Every training task computes the placement from the same list, with the same result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tfcluster.runtime.collective.transports.base import Array, Slices

_SPLIT_DIVISOR = 16
"""Variables smaller than 1/16 of the average load of a ps are not split."""


@dataclass(frozen=True, slots=True)
class ModelVariable:
    """One trainable variable of a model.

    ``dtype`` is the name that numpy and TensorFlow use, such as "bfloat16", and
    ``item_bytes`` is its number of bytes per item.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    item_bytes: int = 4
    rows_only: bool = False
    """Whether a sparse gradient changes only its rows, so only these are sent back."""

    @property
    def rows(self) -> int:
        """The size of the first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def bytes(self) -> int:
        """The bytes of the whole variable."""
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class VariablePiece:
    """A shard of a variable: its rows ``start`` to ``end``."""

    variable: int
    """The index of the variable in the model's list."""
    start: int
    end: int
    whole: bool
    """Whether this is the whole variable."""


Placement = tuple[tuple[VariablePiece, ...], ...]
"""The pieces of each ps, in the order of the variables."""


def placed(
    variables: Sequence[ModelVariable],
    servers: int,
    *,
    splittable: bool = False,
    together: bool = False,
) -> Placement:
    """Place each variable, largest first, on the ps that has the fewest bytes so far.

    Among equally loaded ps tasks, the first is chosen: greedy scheduling by longest
    processing time (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969). With
    ``splittable``, large variables are first split by rows, evenly among all ps. With
    ``together``, all variables are placed on the first ps.
    """
    if together or servers == 1:
        everything = tuple(_whole(v, i) for i, v in enumerate(variables))
        return (everything, *([()] * (servers - 1)))
    pieces: list[list[VariablePiece]] = [[] for _ in range(servers)]
    loads = [0] * servers
    order = sorted(range(len(variables)), key=lambda i: -variables[i].bytes)
    average = sum(variable.bytes for variable in variables) / servers
    to_split = [
        i
        for i in order
        if splittable
        and variables[i].rows > 1
        and variables[i].bytes > average / _SPLIT_DIVISOR
    ]
    target = sum(variables[i].bytes for i in to_split) / servers
    for index in to_split:
        _split(variables[index], index, target, pieces, loads)
    for index in order:
        if index not in to_split:
            ps = loads.index(min(loads))
            pieces[ps].append(_whole(variables[index], index))
            loads[ps] += variables[index].bytes
    return tuple(
        tuple(sorted(some, key=lambda piece: (piece.variable, piece.start)))
        for some in pieces
    )


def bytes_of(variables: Sequence[ModelVariable], piece: VariablePiece) -> int:
    """The number of bytes of a piece."""
    variable = variables[piece.variable]
    row = variable.bytes // max(1, variable.rows)
    return row * (piece.end - piece.start)


def _whole(variable: ModelVariable, index: int) -> VariablePiece:
    return VariablePiece(index, 0, variable.rows, True)


def _split(
    variable: ModelVariable,
    index: int,
    target: float,
    pieces: list[list[VariablePiece]],
    loads: list[int],
) -> None:
    """Split a variable: fill the emptiest ps up to ``target`` bytes, then the next.

    No ps gets two pieces; the last ps gets the rest.
    """
    row = variable.bytes // variable.rows
    start = 0
    left = set(range(len(loads)))
    while start < variable.rows:
        ps = min(left, key=lambda ps: (loads[ps], ps))
        left.remove(ps)
        rows = max(1, round((target - loads[ps]) / row))
        end = min(variable.rows, start + rows) if left else variable.rows
        whole = (start, end) == (0, variable.rows)
        pieces[ps].append(VariablePiece(index, start, end, whole))
        loads[ps] += (end - start) * row
        start = end


# --- signatures of models -------------------------------------------------------------


_MAX_LISTED = 8
"""The maximum number of differences listed in a message."""
_OPTIONS = ("synchronous", "splittable", "together", "servers", "rows_only")


def facts_of(
    variables: Sequence[ModelVariable],
    *,
    synchronous: bool,
    splittable: bool,
    together: bool,
    servers: int,
) -> dict[str, Any]:
    """The signature, which has to be equal on all tasks; suitable for JSON."""
    return {
        "variables": [[v.path, v.dtype, list(v.shape)] for v in variables],
        "rows_only": [v.rows_only for v in variables],
        "synchronous": synchronous,
        "splittable": splittable,
        "together": together,
        "servers": servers,
    }


def differing(
    server_facts: Mapping[str, Any], rank_facts: Mapping[str, Any], rank: int
) -> str | None:
    """A sentence on how the model of ``rank`` differs from the ps's model, or None.

    Both arguments are results of ``facts_of``, perhaps converted to JSON and back.
    """
    if server_facts == rank_facts:
        return None
    on_ps = {
        path: (dtype, tuple(shape)) for path, dtype, shape in server_facts["variables"]
    }
    on_rank = {
        path: (dtype, tuple(shape)) for path, dtype, shape in rank_facts["variables"]
    }
    differences = [f"{path} is missing" for path in on_ps if path not in on_rank]
    differences += [f"{path} is not on the ps" for path in on_rank if path not in on_ps]
    differences += [
        f"{path} is {_described(*on_rank[path])}, on the ps {_described(*on_ps[path])}"
        for path in on_rank
        if path in on_ps and on_rank[path] != on_ps[path]
    ]
    if not differences and list(on_ps) != list(on_rank):
        differences = ["its variables are in a different order"]
    if not differences:
        differences = [
            f"{name.replace('_', ' ')} is {rank_facts[name]}, "
            f"on the ps {server_facts[name]}"
            for name in _OPTIONS
            if rank_facts[name] != server_facts[name]
        ]
    more = (
        f" and {len(differences) - _MAX_LISTED} more"
        if len(differences) > _MAX_LISTED
        else ""
    )
    listed = "; ".join(differences[:_MAX_LISTED])
    return f"the model of rank {rank} differs: {listed}{more}"


def _described(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}{list(shape)}"


Gradient: TypeAlias = Array | Slices | None
"""None if the variable has no gradient in this step."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The changed rows of a variable: row ``indices[i]`` is now ``values[i]``.

    ``values`` has shape (n, ...) and the variable's dtype, ``indices`` int64 of shape
    (n,).
    """

    values: Array
    indices: NDArray[np.int64]


Part = tuple[Sequence[VariablePiece], str, Sequence[Array]]
"""One ps's answer: its pieces, a letter for each piece, and arrays.

See ``ShardedModel.changes_since``."""


def slice_piece(array: Array, piece: VariablePiece) -> Array:
    """The rows of ``piece``, shape (end - start, ...): a view of ``array``."""
    return array if piece.whole else array[piece.start : piece.end]


def pushed_part(
    variables: Sequence[ModelVariable],
    pieces: Sequence[VariablePiece],
    gradients: Sequence[Gradient],
) -> tuple[str, list[Array]]:
    """The kinds and arrays to push to the ps that has ``pieces``.

    Kinds are a letter for each piece: ``d`` for an array, ``s`` for values and indices,
    ``-`` for no gradient. Raises IndexError for an index beyond a variable's rows.
    """
    kinds, arrays = "", []
    for piece in pieces:
        gradient = gradients[piece.variable]
        if gradient is None:
            kinds += "-"
        elif isinstance(gradient, Slices):
            kinds += "s"
            arrays += _rows_within(gradient, piece, variables[piece.variable])
        else:
            kinds += "d"
            arrays.append(slice_piece(gradient, piece))
    return kinds, arrays


def _rows_within(
    slices: Slices, piece: VariablePiece, variable: ModelVariable
) -> list[Array]:
    values, indices = slices.values, slices.indices.astype(np.int64, copy=False)
    if len(indices) and (indices.min() < 0 or indices.max() >= variable.rows):
        raise IndexError(
            f"a gradient of {variable.path} has rows beyond its {variable.rows}"
        )
    if piece.whole:
        return [values, indices]
    within = (indices >= piece.start) & (indices < piece.end)
    return [values[within], indices[within] - piece.start]


def joined(
    variables: Sequence[ModelVariable], parts: Mapping[int, Part]
) -> list[Array | Rows | None]:
    """Join the answers of all ps, in the order of the variables.

    An item is a whole variable, its changed Rows, or None if it has not changed. If
    only some shards of a variable arrived as a whole, their rows are part of the Rows.
    """
    shards_of: list[list[tuple[VariablePiece, Array | Rows | None]]] = [
        [] for _ in variables
    ]
    for pieces, kinds, arrays in parts.values():
        rest = iter(arrays)
        for piece, kind in zip(pieces, kinds, strict=True):
            value: Array | Rows | None = None
            if kind == "d":
                value = next(rest)
            elif kind == "s":
                values = next(rest)
                value = Rows(values, next(rest))
            shards_of[piece.variable].append((piece, value))
    return [_join_shards(shards) for shards in shards_of]


def _join_shards(
    parts: list[tuple[VariablePiece, Array | Rows | None]],
) -> Array | Rows | None:
    parts.sort(key=lambda part: part[0].start)
    if len(parts) == 1:
        return parts[0][1]
    if all(isinstance(value, np.ndarray) for _, value in parts):
        return np.concatenate([value for _, value in parts])
    rows = []
    for piece, value in parts:
        if isinstance(value, Rows):
            rows.append(Rows(value.values, value.indices + piece.start))
        elif value is not None:
            rows.append(Rows(value, np.arange(piece.start, piece.end)))
    if not rows:
        return None
    return Rows(
        np.concatenate([some.values for some in rows]),
        np.concatenate([some.indices for some in rows]),
    )


def joined_slots(
    variables: Sequence[ModelVariable],
    parts: Mapping[int, tuple[Sequence[VariablePiece], Mapping[str, Array]]],
) -> dict[str, Array]:
    """Slots by path; the slots of split variables are joined.

    If several ps have another slot, such as the step counter, the first is used.
    """
    whole: dict[str, Array] = {}
    split: dict[str, list[tuple[int, Array]]] = {}
    for ps in sorted(parts):
        pieces, slots = parts[ps]
        for path, value in slots.items():
            piece = _piece_of(variables, pieces, path, value)
            if piece is None:
                whole.setdefault(path, value)
            else:
                split.setdefault(path, []).append((piece.start, value))
    for path, values in split.items():
        values.sort(key=lambda part: part[0])
        whole[path] = np.concatenate([value for _, value in values])
    return whole


def part_of(
    variables: Sequence[ModelVariable],
    pieces: Sequence[VariablePiece],
    path: str,
    value: Array,
) -> tuple[int | str | None, Array]:
    """The target to set on the ps that has ``pieces``, and its value.

    The target is the number of a piece, the path of a slot, or None if the variable or
    slot is not on this ps.
    """
    for index, piece in enumerate(pieces):
        if variables[piece.variable].path == path:
            return index, slice_piece(value, piece)
    if any(variable.path == path for variable in variables):
        return None, value
    owner = _owner(variables, path, value)
    if owner is None:
        return path, value
    for piece in pieces:
        if piece.variable == owner:
            return path, slice_piece(value, piece)
    return None, value


def _piece_of(
    variables: Sequence[ModelVariable],
    pieces: Sequence[VariablePiece],
    path: str,
    value: Array,
) -> VariablePiece | None:
    """The piece of a split variable to which a slot belongs; None if there is none."""
    candidates = [
        piece
        for piece in pieces
        if not piece.whole
        and value.ndim
        and len(value) == piece.end - piece.start
        and _in_path(variables[piece.variable], path)
    ]
    return max(
        candidates, key=lambda piece: len(variables[piece.variable].path), default=None
    )


def _owner(variables: Sequence[ModelVariable], path: str, value: Array) -> int | None:
    candidates = [
        index
        for index, variable in enumerate(variables)
        if _in_path(variable, path) and value.ndim and len(value) == variable.rows
    ]
    return max(candidates, key=lambda index: len(variables[index].path), default=None)


def _in_path(variable: ModelVariable, path: str) -> bool:
    return variable.path.replace("/", "_") in path


# --- parts of gradients, one from each rank -------------------------------------------


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of every array a rank sends: part ``number`` of ``count``.

    All ranks of a synchronous model have the same gradients. So each sends its part of
    every array, and together they send each number once. Part -1 is empty.
    """

    number: int
    count: int

    def of(self, kinds: str, arrays: Sequence[Array]) -> list[Array]:
        """This part of the arrays of gradients of these kinds (see ``client.Pack``).

        Dense arrays are flattened; of slices, some entries are chosen.
        """
        rest, chosen = iter(arrays), []
        for kind in kinds:
            if kind == "d":
                chosen.append(self._chosen(next(rest).reshape(-1)))
            elif kind == "s":
                chosen += [self._chosen(next(rest)), self._chosen(next(rest))]
        return chosen

    def _chosen(self, array: Array) -> Array:
        if self.number < 0:
            return array[:0]
        size = len(array)
        start = self.number * size // self.count
        return array[start : (self.number + 1) * size // self.count]


@dataclass(frozen=True, slots=True)
class Pushed:
    """The parts of gradients that one rank has pushed, in the order of the pieces."""

    kinds: str
    gradients: Sequence[Gradient]


def difference(pushed: Mapping[int, Pushed]) -> str | None:
    """A sentence on how the kinds of the ranks' gradients differ; None if equal."""
    (first, expected), *others = sorted(pushed.items())
    for rank, other in others:
        for index, (a, b) in enumerate(zip(expected.kinds, other.kinds, strict=False)):
            if a != b:
                return (
                    f"rank {first} has {_WORDS[a]} for piece {index}, rank {rank} has "
                    f"{_WORDS[b]}"
                )
    return None


_WORDS = {"d": "an array", "s": "rows", "-": "no gradient"}


def whole_gradients(
    pushed: Mapping[int, Pushed], shapes: Sequence[Sequence[int]]
) -> list[Gradient]:
    """The whole gradients of pieces of these shapes, from the parts of all ranks.

    All ranks have the same kinds and dtypes. Raises ValueError if parts are missing.
    """
    columns = zip(*(pushed[rank].gradients for rank in sorted(pushed)), strict=True)
    return [
        _joined(column, shape) for column, shape in zip(columns, shapes, strict=True)
    ]


def _joined(column: Sequence[Gradient], shape: Sequence[int]) -> Gradient:
    slices = [part for part in column if isinstance(part, Slices)]
    if slices:
        return Slices(
            _concatenated([part.values for part in slices]),
            _concatenated([part.indices for part in slices]),
        )
    arrays = [part for part in column if isinstance(part, np.ndarray)]
    return _concatenated(arrays).reshape(shape) if arrays else None


def _concatenated(parts: Sequence[Array]) -> Array:
    filled = [part for part in parts if len(part)]
    if len(filled) == 1:
        return filled[0]
    return np.concatenate(parts)
