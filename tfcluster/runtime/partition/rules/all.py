"""The whole table."""

from __future__ import annotations

from tfcluster.runtime.partition.rules import (
    contractions,
    elementwise,
    gathers,
    images,
    linear,
    lists,
    random,
    reductions,
    rows,
    shapes,
    slices,
    without_rule,
)
from tfcluster.runtime.partition.rules.table import RULES, WHOLE

__all__ = [
    "RULES",
    "WHOLE",
    "contractions",
    "elementwise",
    "gathers",
    "images",
    "linear",
    "lists",
    "random",
    "reductions",
    "rows",
    "shapes",
    "slices",
    "without_rule",
]
