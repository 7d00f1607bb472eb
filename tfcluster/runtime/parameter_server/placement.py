"""Variable sharding: which variables, or which rows, are on which ps. Pure.

Every training task computes the placement from the same list, with the same result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SPLIT_DIVISOR = 16
"""Variables smaller than 1/16 of the average load of a ps are not split."""


@dataclass(frozen=True, slots=True)
class Variable:
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
class Piece:
    """A shard of a variable: its rows ``start`` to ``end``."""

    variable: int
    """The index of the variable in the model's list."""
    start: int
    end: int
    whole: bool
    """Whether this is the whole variable."""


Placement = tuple[tuple[Piece, ...], ...]
"""The pieces of each ps, in the order of the variables."""


def placed(
    variables: Sequence[Variable],
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
    pieces: list[list[Piece]] = [[] for _ in range(servers)]
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


def bytes_of(variables: Sequence[Variable], piece: Piece) -> int:
    """The number of bytes of a piece."""
    variable = variables[piece.variable]
    row = variable.bytes // max(1, variable.rows)
    return row * (piece.end - piece.start)


def _whole(variable: Variable, index: int) -> Piece:
    return Piece(index, 0, variable.rows, True)


def _split(
    variable: Variable,
    index: int,
    target: float,
    pieces: list[list[Piece]],
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
        pieces[ps].append(Piece(index, start, end, whole))
        loads[ps] += (end - start) * row
        start = end


# --- signatures of models -------------------------------------------------------------


_MAX_LISTED = 8
"""The maximum number of differences listed in a message."""
_OPTIONS = ("synchronous", "splittable", "together", "servers", "rows_only")


def facts_of(
    variables: Sequence[Variable],
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
    found = [f"{path} is missing" for path in on_ps if path not in on_rank]
    found += [f"{path} is not on the ps" for path in on_rank if path not in on_ps]
    found += [
        f"{path} is {_described(*on_rank[path])}, on the ps {_described(*on_ps[path])}"
        for path in on_rank
        if path in on_ps and on_rank[path] != on_ps[path]
    ]
    if not found and list(on_ps) != list(on_rank):
        found = ["its variables are in a different order"]
    if not found:
        found = [
            f"{name.replace('_', ' ')} is {rank_facts[name]}, "
            f"on the ps {server_facts[name]}"
            for name in _OPTIONS
            if rank_facts[name] != server_facts[name]
        ]
    more = f" and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
    return f"the model of rank {rank} differs: {'; '.join(found[:_MAX_LISTED])}{more}"


def _described(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}{list(shape)}"
