"""The table of kept interpreters. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tfcluster.console.sanitise import sanitise_word
from tfcluster.console.text import byte_size, duration, table

HEADER = ("host", "pid", "age", "ends in", "imported", "memory", "used", "kept for")
_RIGHT = (1, 2, 3, 5)

Row = tuple[str, Mapping[str, Any]]
"""A host, and what an interpreter there has reported."""


def kept_table(rows: Sequence[Row]) -> list[str]:
    return table([_cells(*row) for row in rows], HEADER, right=_RIGHT)


def kept_json(host: str, kept: Mapping[str, Any]) -> dict[str, Any]:
    """A row as JSON, for programs; hosts may have sent anything."""
    libraries = kept.get("libraries")
    known = libraries if isinstance(libraries, dict) else {}
    return {
        "host": host,
        "pid": int(number(kept, "pid")),
        "python": str(kept.get("python")),
        "config": str(kept.get("purpose")),
        "libraries": {str(name): str(version) for name, version in known.items()},
        "age_s": number(kept, "age_s"),
        "ends_in_s": number(kept, "ends_in_s"),
        "uses": int(number(kept, "uses")),
        "memory_bytes": int(number(kept, "memory_bytes")),
    }


def _cells(host: str, kept: Mapping[str, Any]) -> list[str]:
    libraries = kept.get("libraries")
    known = libraries if isinstance(libraries, dict) else {}
    imported = ", ".join(f"{name} {version}" for name, version in known.items())
    uses = kept.get("uses")
    times = {0: "never", 1: "once"}.get(uses if isinstance(uses, int) else 0)
    cells = [
        host,
        str(kept.get("pid")),
        duration(number(kept, "age_s")),
        duration(number(kept, "ends_in_s")),
        imported,
        byte_size(int(number(kept, "memory_bytes"))),
        times or f"{uses} times",
        str(kept.get("purpose")),
    ]
    return [sanitise_word(cell) for cell in cells]


def number(kept: Mapping[str, Any], key: str) -> float:
    """A number that a host has sent; 0 if it sent something else."""
    value = kept.get(key)
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return 0.0
