"""Recognises a weight whose gradient is zero except for rounding. Pure.

A bias before a normalisation, or the bias of the keys in an attention layer, has no
influence on the loss. Adam divides such a gradient by its own size, so the weight
follows the rounding, and differs between any two orders of a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

_SMALL = 1e-5
"""Rounding errors in float32 are below this part of the largest gradient."""

_Names = Sequence[tuple[str, str]]


def follows_rounding(
    weight: str,
    at: int,
    names: _Names,
    mine: Sequence[npt.NDArray[Any]],
    theirs: Sequence[npt.NDArray[Any]],
) -> bool:
    """Whether an optimizer has accumulated only rounding from an element's gradients.

    ``names`` has the kind and name of each array after a step, ``mine`` and ``theirs``
    have these arrays of the two runs, and ``at`` is the element's flat index in
    ``weight``. Known only for optimizers that keep moments of the gradients.
    """
    found = False
    for place, suffix in _slots_of(weight, names):
        family = [
            array
            for (kind, name), array in zip(names, mine, strict=True)
            if kind == "slot" and name.endswith(suffix)
        ]
        for arrays in (mine, theirs):
            if place >= len(arrays) or arrays[place].size <= at:
                continue  # the slots of ranks may be on a ps
            value = abs(float(arrays[place].flat[at]))
            if value > _SMALL * max(_largest(array) for array in family):
                return False
            found = True
    return found


def _slots_of(weight: str, names: _Names) -> Iterator[tuple[int, str]]:
    """The places of the weight's slots, and the suffix of the names of such slots.

    Keras names the slot ``momentum`` of ``model/dense/bias``
    ``adam/model_dense_bias_momentum``.
    """
    stem = weight.replace("/", "_") + "_"
    for place, (kind, name) in enumerate(names):
        _, _, last = name.rpartition("/")
        if kind == "slot" and last.startswith(stem):
            yield place, "_" + last.removeprefix(stem)


def _largest(array: npt.NDArray[Any]) -> float:
    return float(abs(array).max()) if array.size else 0.0
