"""Makes tables of the keys of JSON formats from their types, for the site."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tfcluster import documents

_MARK = re.compile(r"^<!-- keys of ([\w-]+) -->$", re.MULTILINE)
_FORMATS = {f"#/$defs/{kind.__name__}" for kind in documents.FORMATS.values()}


def with_tables(markdown: str) -> str:
    """The page with a table in place of each mark ``<!-- keys of NAME -->``."""
    return _MARK.sub(lambda match: "\n".join(table(match[1])), markdown)


def table(name: str) -> list[str]:
    """The lines of one format's table."""
    rows = ["| key | type | |", "| --- | --- | --- |"]
    schema = documents.schema(name)
    for key, kind, about in _keys(schema, schema.get("$defs", {}), ""):
        rows.append(f"| `{key}` | {kind} | {about} |")
    return rows


def _keys(node: Any, parts: Any, path: str) -> Iterator[tuple[str, str, str]]:
    """Path, type and description of every key below ``node``.

    Those of another format have a table of their own.
    """
    for key, given in node.get("properties", {}).items():
        below = _resolved(given, parts)
        about = given.get("description") or below.get("description") or ""
        choices = [each for each in below.get("anyOf", ()) if each != {"type": "null"}]
        inner = _resolved(choices[0], parts) if choices else below
        name = f"{path}{key}"
        yield name, _kind(below, parts), about
        items = inner
        if "items" in inner:
            items, name = inner["items"], f"{name}[]"
        elif isinstance(inner.get("additionalProperties"), dict):
            items, name = inner["additionalProperties"], f"{name}.*"
        if items.get("$ref") not in _FORMATS:
            yield from _keys(_resolved(items, parts), parts, f"{name}.")


def _kind(node: Any, parts: Any) -> str:
    if "const" in node:
        return str(node["const"])
    if "enum" in node:
        return ", ".join(f"`{word}`" for word in node["enum"])
    if "anyOf" in node:
        kinds = (_kind(_resolved(each, parts), parts) for each in node["anyOf"])
        return " or ".join(dict.fromkeys(kinds))
    kind = node.get("type", "any")
    return kind if isinstance(kind, str) else " or ".join(kind)


def _resolved(node: Any, parts: Any) -> Any:
    """The node that a reference leads to, or the node itself."""
    return parts[node["$ref"].rpartition("/")[2]] if "$ref" in node else node
