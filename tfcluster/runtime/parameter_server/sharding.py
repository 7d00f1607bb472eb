"""Cuts variables and gradients into shards, and joins shards again. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tfcluster.runtime.collective.sparse import Slices
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.parameter_server.placement import Piece, Variable

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


Part = tuple[Sequence[Piece], str, Sequence[Array]]
"""One ps's answer: its pieces, a letter for each piece, and arrays.

See ``ShardedModel.changes_since``."""


def slice_piece(array: Array, piece: Piece) -> Array:
    """The rows of ``piece``, shape (end - start, ...): a view of ``array``."""
    return array if piece.whole else array[piece.start : piece.end]


def pushed_part(
    variables: Sequence[Variable],
    pieces: Sequence[Piece],
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


def _rows_within(slices: Slices, piece: Piece, variable: Variable) -> list[Array]:
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
    variables: Sequence[Variable], parts: Mapping[int, Part]
) -> list[Array | Rows | None]:
    """Join the answers of all ps, in the order of the variables.

    An item is a whole variable, its changed Rows, or None if it has not changed. If
    only some shards of a variable arrived as a whole, their rows are part of the Rows.
    """
    found: list[list[tuple[Piece, Array | Rows | None]]] = [[] for _ in variables]
    for pieces, kinds, arrays in parts.values():
        rest = iter(arrays)
        for piece, kind in zip(pieces, kinds, strict=True):
            value: Array | Rows | None = None
            if kind == "d":
                value = next(rest)
            elif kind == "s":
                values = next(rest)
                value = Rows(values, next(rest))
            found[piece.variable].append((piece, value))
    return [_join_shards(shards) for shards in found]


def _join_shards(parts: list[tuple[Piece, Array | Rows | None]]) -> Array | Rows | None:
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
    variables: Sequence[Variable],
    parts: Mapping[int, tuple[Sequence[Piece], Mapping[str, Array]]],
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
    variables: Sequence[Variable], pieces: Sequence[Piece], path: str, value: Array
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
    variables: Sequence[Variable], pieces: Sequence[Piece], path: str, value: Array
) -> Piece | None:
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


def _owner(variables: Sequence[Variable], path: str, value: Array) -> int | None:
    candidates = [
        index
        for index, variable in enumerate(variables)
        if _in_path(variable, path) and value.ndim and len(value) == variable.rows
    ]
    return max(candidates, key=lambda index: len(variables[index].path), default=None)


def _in_path(variable: Variable, path: str) -> bool:
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
        rest, found = iter(arrays), []
        for kind in kinds:
            if kind == "d":
                found.append(self._chosen(next(rest).reshape(-1)))
            elif kind == "s":
                found += [self._chosen(next(rest)), self._chosen(next(rest))]
        return found

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
