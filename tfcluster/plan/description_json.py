"""Frozen dataclasses, such as a Description, as JSON types, and back. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from tfcluster.base.light_dataclasses import as_dict, fields


def to_plain(value: object) -> Any:
    """Frozen dataclasses as JSON types."""
    if fields(type(value)) is not None:
        return {name: to_plain(item) for name, item in as_dict(value).items()}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def from_plain(kind: Any, value: Any) -> Any:
    """The inverse of ``to_plain``. Raises KeyError, TypeError or ValueError."""
    if kind is Any:
        return value
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None:
            return None
        (kind,) = (choice for choice in arguments if choice is not type(None))
        return from_plain(kind, value)
    if origin is tuple:
        _require(list, value)
        return tuple(from_plain(arguments[0], item) for item in value)
    if origin is not None:  # a mapping
        _require(Mapping, value)
        return {key: from_plain(arguments[1], item) for key, item in value.items()}
    if (names := fields(kind)) is not None:
        _require(Mapping, value)
        hints = get_type_hints(kind)
        return kind(
            **{
                name: from_plain(hints[name], value[name])
                for name, required in names.items()
                if required or name in value
            }
        )
    if issubclass(kind, Enum | Path):
        return kind(value)
    _require(float | int if kind is float else kind, value)
    return value


def _require(kind: Any, value: Any) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not of type {kind}")
