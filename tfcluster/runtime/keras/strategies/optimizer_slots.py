"""An optimizer's own variables, and which of them a shadow's are.

By name, as Keras derives it from that of the trained variable; where two variables have
the same path, by order.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tfcluster.runtime.keras import internals
from tfcluster.runtime.parameter_server.placement import Piece
from tfcluster.runtime.tensors import name_of

_NAMELESS = re.compile(r"variable(_\d+)?")
_IN_SHADOW = re.compile(r"tfcluster(\d+)_(.+)")


@dataclass(frozen=True, slots=True)
class Slot:
    """One of a shadow's variables."""

    path: str
    """That of the program's optimizer's variable that it stands for."""
    variable: Any
    piece: Piece | None
    """Whose it is; None: it belongs to no trained variable."""


def path_in_shadow(index: int) -> str:
    """What a shadow calls its piece of the variable of that place."""
    return f"tfcluster{index}"


def unique(variables: Iterable[Any]) -> list[str]:
    """Their paths, with a number where one comes again."""
    seen: Counter[str] = Counter()
    paths = []
    for variable in variables:
        path = name_of(variable)
        seen[path] += 1
        paths.append(path if seen[path] == 1 else f"{path}#{seen[path]}")
    return paths


def slots_of_shadow(optimizer: Any, shadow: Any, pieces: Sequence[Piece]) -> list[Slot]:
    """What each of ``shadow``'s variables is in ``optimizer``, whose shadow it is."""
    originals = optimizer.variables
    paths = unique(originals)
    by_name: dict[str, list[str]] = defaultdict(list)
    for path, variable in zip(paths, originals, strict=True):
        by_name[_last(variable)].append(path)
    trained = internals.trained_variables(optimizer)
    stems = [_stem(variable) for variable in trained]
    place = {piece.variable: piece for piece in pieces}
    alike = Counter(_last(variable) for variable in shadow.variables)
    seen: Counter[str] = Counter()
    slots = []
    for variable in shadow.variables:
        name, piece = _last(variable), None
        number = seen[name]
        seen[name] += 1
        if found := _IN_SHADOW.fullmatch(name):
            index = int(found[1])
            piece = place[index]
            candidates = by_name[f"{stems[index]}_{found[2]}"]
            number = stems[:index].count(stems[index])
        else:
            candidates = by_name[name]
            if alike[name] == len(pieces) and len(candidates) == len(trained) > 1:
                # One for each trained variable, all of the same name.
                piece = pieces[number]
                number = piece.variable
        path = candidates[number] if number < len(candidates) else f"{name}#own{number}"
        slots.append(Slot(path, variable, piece))
    return slots


def _last(variable: Any) -> str:
    name = name_of(variable).rpartition("/")[2]
    # Keras numbers those that were given no name (Nadam's) as they come.
    return "variable" if _NAMELESS.fullmatch(name) else name


def _stem(variable: Any) -> str:
    """The beginning of the names that Keras gives a variable's slots."""
    if hasattr(variable, "path"):
        return str(variable.path).replace("/", "_")
    return str(variable.name).replace("/", "_").replace(":", "_")
