"""JSON Schemas (draft 2020-12) of documents, from their types.

The schemas allow additional keys, because a later version may add some.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from tfcluster.base.vocabulary import FORMAT_VERSION

FormatVersion = Annotated[Literal[1], "The version of the format."]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_PLACE = f"https://tfcluster.example/schema/{FORMAT_VERSION}"
_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean"}
_NULL = {"type": "null"}


@dataclass(frozen=True, slots=True)
class Pattern:
    """The regular expression that a text matches, for ``Annotated[str, ...]``."""

    expression: str


def schema_of(kind: type, name: str) -> dict[str, Any]:
    """The JSON Schema of a TypedDict; ``name`` is that of the format."""
    parts: dict[str, Any] = {}
    _object(kind, parts)
    top = parts.pop(kind.__name__)
    top["title"] = top.pop("description")
    return {
        "$schema": _DIALECT,
        "$id": f"{_PLACE}/{name}.schema.json",
        **top,
        **({"$defs": parts} if parts else {}),
    }


def _schema(kind: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """The schema of any type; those of objects are added to ``parts`` by name."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        schema = _schema(arguments[0], parts)
        for note in arguments[1:]:
            if isinstance(note, Pattern):
                schema = {**schema, "pattern": note.expression}
            else:
                schema = {**schema, "description": note}
        return schema
    if is_typeddict(kind):
        if kind.__name__ not in parts:
            _object(kind, parts)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if origin is Literal:
        only = {"const": arguments[0]}
        return only if len(arguments) == 1 else {"enum": list(arguments)}
    if origin in (Union, UnionType):
        return _any_of([_schema(choice, parts) for choice in arguments])
    if origin is list:
        return {"type": "array", "items": _schema(arguments[0], parts)}
    if origin is dict:
        values = {} if arguments[1] is Any else _schema(arguments[1], parts)
        return {"type": "object", "additionalProperties": values or True}
    return _NULL if kind is NoneType else {"type": _NAMES[kind]}


def _any_of(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """A union: shorter if it is one of simple types, perhaps one with a pattern."""
    simple = [choice for choice in choices if set(choice) <= {"type", "pattern"}]
    if len(simple) < len(choices):
        enums = [choice["enum"] for choice in choices if set(choice) == {"enum"}]
        if len(enums) == len(choices):
            return {"enum": [word for words in enums for word in words]}
        return {"anyOf": choices}
    merged = {key: value for choice in simple for key, value in choice.items()}
    return {**merged, "type": [choice["type"] for choice in simple]}


def _object(kind: type, parts: dict[str, Any]) -> None:
    about = re.sub("`+", "`", kind.__doc__ or "")
    schema: dict[str, Any] = {"description": about, "type": "object"}
    parts[kind.__name__] = schema
    hints = get_type_hints(kind, include_extras=True)
    required: frozenset[str] = kind.__required_keys__  # type: ignore[attr-defined]  # of each TypedDict
    schema["required"] = [key for key in hints if key in required]
    schema["properties"] = {key: _schema(hint, parts) for key, hint in hints.items()}
