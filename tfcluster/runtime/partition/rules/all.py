"""The whole table."""

from __future__ import annotations

from tfcluster.runtime.partition.functions import BRANCHES, CALLS, LOOPS
from tfcluster.runtime.partition.rules import (  # noqa: F401 - registers its rules
    contractions,
    elementwise,
    gathers,
    images,
    linear,
    lists,
    random,
    reductions,
    rows,
    scatters,
    shapes,
    slices,
    sparse,
    strings,
    tables,
    without_rule,
)
from tfcluster.runtime.partition.rules.table import RULES, WHOLE, why_whole

__all__ = ["RULES", "WHOLE", "is_known", "why_whole"]

_STRUCTURE = frozenset((*CALLS, *LOOPS, *BRANCHES, "NoOp", "ControlTrigger"))
"""Ops that the passes themselves treat: they are inlined, or have bodies."""


def is_known(op_type: str) -> bool:
    """Whether an op has a rule, or a reason to be computed whole."""
    return (
        op_type in RULES
        or op_type in _STRUCTURE
        or random.is_draw(op_type)
        or why_whole(op_type) is not None
    )
