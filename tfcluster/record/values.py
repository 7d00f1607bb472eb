"""Takes values out of JSON that may be malformed. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]

_LIMIT = 2**63


def text(source: Json, key: str) -> str | None:
    value = source.get(key)
    return value if isinstance(value, str) else None


def integer(source: Json, key: str) -> int | None:
    """An integer of at most 64 bits, or None."""
    value = source.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if -_LIMIT <= value < _LIMIT else None


def number(source: Json, key: str) -> float | None:
    """A finite number (JSON has no others), or None."""
    value = source.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond the range of floats
        return None


def objects(source: Json, key: str) -> list[Json]:
    value = source.get(key)
    if not isinstance(value, list):
        return []
    return [entry for entry in value if isinstance(entry, Mapping)]


def metric_values(found: Any) -> dict[str, float | None]:
    """Losses and metrics by name; a value that is not a number is None."""
    if not isinstance(found, Mapping):
        return {}
    return {str(name): number(found, name) for name in found}
