"""Matches an optimizer's slot variables with the slot variables of its replica.

They are matched by name, since Keras derives it from the name of the trained variable,
and by order if several variables have the same path.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tfcluster.runtime.keras import internals
from tfcluster.runtime.keras.types import Optimizer, Variable
from tfcluster.runtime.parameter_server.placement import Piece
from tfcluster.runtime.tensors import name_of

_NAMELESS = re.compile(r"variable(_\d+)?")
_IN_REPLICA = re.compile(r"tfcluster(\d+)_(.+)")


@dataclass(frozen=True, slots=True)
class Slot:
    """One of a replica's variables."""

    path: str
    """The path of the corresponding variable of the program's optimizer."""
    variable: Variable
    piece: Piece | None
    """The piece to which it belongs; None if it belongs to no trained variable."""


def path_in_replica(index: int) -> str:
    """The path of a replica's piece of the variable at this index."""
    return f"tfcluster{index}"


def unique(variables: Iterable[Variable]) -> list[str]:
    """The variables' paths; repeated paths get a number."""
    seen: Counter[str] = Counter()
    paths = []
    for variable in variables:
        path = name_of(variable)
        seen[path] += 1
        paths.append(path if seen[path] == 1 else f"{path}#{seen[path]}")
    return paths


def slots_of_replica(
    optimizer: Optimizer, replica: Optimizer, pieces: Sequence[Piece]
) -> list[Slot]:
    """Match each variable of ``replica`` with one of ``optimizer``'s.

    ``pieces`` are the pieces for which the replica was built, in the same order.
    """
    originals = optimizer.variables
    paths = unique(originals)
    by_name: dict[str, list[str]] = defaultdict(list)
    for path, variable in zip(paths, originals, strict=True):
        by_name[_last(variable)].append(path)
    trained = internals.trained_variables(optimizer)
    prefixes = [_prefix(variable) for variable in trained]
    place = {piece.variable: piece for piece in pieces}
    counts = Counter(_last(variable) for variable in replica.variables)
    seen: Counter[str] = Counter()
    slots = []
    for variable in replica.variables:
        name, piece = _last(variable), None
        number = seen[name]
        seen[name] += 1
        if found := _IN_REPLICA.fullmatch(name):
            index = int(found[1])
            piece = place[index]
            candidates = by_name[f"{prefixes[index]}_{found[2]}"]
            number = prefixes[:index].count(prefixes[index])
        else:
            candidates = by_name[name]
            if counts[name] == len(pieces) and len(candidates) == len(trained) > 1:
                # There is one per trained variable, and all have the same name.
                piece = pieces[number]
                number = piece.variable
        path = candidates[number] if number < len(candidates) else f"{name}#own{number}"
        slots.append(Slot(path, variable, piece))
    return slots


def _last(variable: Variable) -> str:
    name = name_of(variable).rpartition("/")[2]
    # Keras numbers nameless variables (Nadam's) consecutively.
    return "variable" if _NAMELESS.fullmatch(name) else name


def _prefix(variable: Variable) -> str:
    """The prefix that Keras gives to the names of a variable's slots."""
    if hasattr(variable, "path"):
        return str(variable.path).replace("/", "_")
    return str(variable.name).replace("/", "_").replace(":", "_")
