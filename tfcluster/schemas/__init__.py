"""The JSON Schemas of what commands print as JSON, one file for each format.

They allow additional keys, because a later version may add some.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_END = ".schema.json"


def names() -> list[str]:
    """The formats: status, plan, ..."""
    return sorted(file.name.removesuffix(_END) for file in _folder().glob(f"*{_END}"))


def read(name: str) -> dict[str, Any]:
    """The JSON Schema of a format. Raises FileNotFoundError for an unknown format."""
    found: dict[str, Any] = json.loads((_folder() / f"{name}{_END}").read_bytes())
    return found


def _folder() -> Path:
    return Path(__file__).parent
