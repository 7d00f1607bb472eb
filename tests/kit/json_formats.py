"""Holds JSON that tfcluster hands out to its published types.

The schemas allow keys that they do not name, since a later version may add some. Here
such a key is an error, so that nobody adds a key without adding it to the schema.
"""

from __future__ import annotations

import functools
from typing import Any

from jsonschema import Draft202012Validator

from tfcluster import documents


def assert_format(name: str, document: object) -> None:
    """Fail unless ``document`` has exactly the keys and types of the format."""
    found = [
        f"{error.json_path}: {error.message}"
        for error in Draft202012Validator(closed(name)).iter_errors(document)
    ]
    assert not found, f"not the format {name}: {found}"


@functools.cache
def closed(name: str) -> dict[str, Any]:
    """The schema, but without keys that it does not name."""
    found: dict[str, Any] = _closed(documents.schema(name))
    return found


def _closed(node: Any) -> Any:
    if isinstance(node, list):
        return [_closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    below = {key: _closed(item) for key, item in node.items()}
    if isinstance(node.get("properties"), dict):
        below.setdefault("additionalProperties", False)
    return below
