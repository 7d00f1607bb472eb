"""Makes tables of the keys of JSON formats from their schemas, for the site."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tfcluster import schemas

_MARK = re.compile(r"^<!-- keys of ([\w-]+) -->$", re.MULTILINE)
_END = ".schema.json"


def with_tables(markdown: str) -> str:
    """The page with a table in place of each mark ``<!-- keys of NAME -->``."""
    return _MARK.sub(lambda match: "\n".join(table(match[1])), markdown)


def table(name: str) -> list[str]:
    """The lines of one format's table."""
    rows = ["| key | type | |", "| --- | --- | --- |"]
    for key, kind, about in _keys(schemas.read(name), name, ""):
        rows.append(f"| `{key}` | {kind} | {about} |")
    return rows


def _keys(node: Any, file: str, path: str) -> Iterator[tuple[str, str, str]]:
    """Path, type and description of every key below ``node``."""
    for key, given in node.get("properties", {}).items():
        below, there = _resolved(given, file)
        about = given.get("description") or below.get("description") or ""
        choices = [each for each in below.get("anyOf", ()) if each != {"type": "null"}]
        inner, there = _resolved(choices[0], there) if choices else (below, there)
        name = f"{path}{key}"
        yield name, _kind(below, there), about
        items, within = inner, there
        if "items" in inner:
            items, within = _resolved(inner["items"], there)
            name = f"{name}[]"
        elif isinstance(inner.get("additionalProperties"), dict):
            items, within = _resolved(inner["additionalProperties"], there)
            name = f"{name}.*"
        if within == file or not items.get("$id"):
            yield from _keys(items, within, f"{name}.")


def _kind(node: Any, file: str) -> str:
    if "const" in node:
        return str(node["const"])
    if "enum" in node:
        return ", ".join(f"`{word}`" for word in node["enum"])
    if "anyOf" in node:
        kinds = (_kind(*_resolved(each, file)) for each in node["anyOf"])
        return " or ".join(dict.fromkeys(kinds))
    kind = node.get("type", "any")
    return kind if isinstance(kind, str) else " or ".join(kind)


def _resolved(node: Any, file: str) -> tuple[Any, str]:
    """The node that a reference leads to, and the format whose file has it."""
    while "$ref" in node:
        place, _, path = node["$ref"].partition("#")
        file = place.removesuffix(_END) or file
        node = schemas.read(file)
        for part in filter(None, path.split("/")):
            node = node[part]
    return node, file
