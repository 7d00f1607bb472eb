"""Encodes dataclasses as frames, and decodes frames by the classes' annotations.

The type of a frame is the name of its class: ``log_error`` for ``LogError``. Its keys
are the fields, all of which are present. A dataclass in a field is a row, the list of
its values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import UnionType

from tfcluster.protocol import wire
from tfcluster.protocol.wire import WireError

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from typing import Any, TypeVar

    T = TypeVar("T")

    Check = Callable[[Any], Any]
    Number = float
    Signed = int
else:

    class Number:
        """A finite number that may be negative; a ``float`` of a frame may not."""

    class Signed:
        """A whole number that may be negative; an ``int`` of a frame may not."""


_MOST = 1 << 64


class ProtocolError(WireError):
    """A frame is of no known type, or a field is missing or has a wrong value."""


def type_of(cls: type) -> str:
    """The type of the frames of this class, such as "ping" for ``PingRequest``."""
    name = cls.__name__.removesuffix("Request").removesuffix("Command")
    name = name.removesuffix("Message")
    words = ("_" + char.lower() if char.isupper() else char for char in name)
    return "".join(words).removeprefix("_")


def encode(frame: object) -> bytes:
    """The frame as one line. Raises WireError if it is too long."""
    return wire.encode({"type": type_of(type(frame)), **vars(frame)}, _row)


def decoder(base: type[T]) -> Callable[[Mapping[str, Any]], T]:
    """A function that makes a subclass's object of a frame, or raises ProtocolError."""
    by_type = {type_of(cls): cls for cls in leaves(base)}

    def decode(frame: Mapping[str, Any]) -> T:
        cls = by_type.get(str(frame.get("type")))
        if cls is None:
            raise ProtocolError(f"no frame is of the type {frame.get('type')!r:.60}")
        return cls(**_values(cls, frame))

    return decode


def leaves(cls: type[T]) -> Iterator[type[T]]:
    """The subclasses that have no subclasses, or else the class."""
    inner = cls.__subclasses__()
    if not inner:
        yield cls
    for subclass in inner:
        yield from leaves(subclass)


def _values(cls: type, frame: Mapping[str, Any]) -> dict[str, Any]:
    decoded = {}
    for name, kind, check in _fields(cls):
        if name not in frame:
            raise ProtocolError(f"{type_of(cls)!r} frame: {name!r} is missing")
        try:
            decoded[name] = check(frame[name])
        except ValueError:
            wrong = repr(frame[name])[:80]
            raise ProtocolError(
                f"{type_of(cls)!r} frame: {name!r} must be {kind}, not {wrong}"
            ) from None
    return decoded


def _row(value: Any) -> list[Any]:
    return [getattr(value, name) for name in value.__match_args__]


@cache
def _fields(cls: type) -> tuple[tuple[str, str, Check], ...]:
    """Name, annotation and check of each field."""
    names = vars(sys.modules[cls.__module__])
    return tuple(
        (name, kind, _check(eval(kind, names)))  # noqa: S307 - our own source code
        for name, kind in cls.__annotations__.items()
    )


@cache
def _check(kind: Any) -> Check:
    """A function that converts what JSON has to this type, or raises ValueError."""
    if kind in _SCALARS:
        return _SCALARS[kind]
    args: tuple[Any, ...] = getattr(kind, "__args__", ())
    if isinstance(kind, UnionType):  # the only unions are with None
        inner = _check(args[0])
        return lambda value: None if value is None else inner(value)
    of = getattr(kind, "__origin__", None)
    if of is Mapping:
        inner = _check(args[1])
        return lambda value: {k: inner(v) for k, v in _exactly(dict, value).items()}
    if of is tuple and args[-1] is ...:
        inner = _check(args[0])
        return lambda value: tuple(map(inner, _exactly(list, value)))
    checks = tuple(map(_check, args)) or tuple(check for *_, check in _fields(kind))
    make = tuple if of is tuple else lambda values: kind(*values)

    def row(value: Any) -> Any:
        if len(_exactly(list, value)) != len(checks):
            raise ValueError
        return make([check(item) for check, item in zip(checks, value, strict=True)])

    return row


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:  # true is an int, but none here
        raise ValueError
    return value


def _whole(value: Any) -> int:
    if type(value) is int and 0 <= value < _MOST:
        return value
    raise ValueError


def _signed(value: Any) -> int:
    if type(value) is int and -_MOST // 2 <= value < _MOST // 2:
        return value
    raise ValueError


def _number(value: Any) -> float:
    if type(value) in (int, float) and abs(value) < float("inf"):
        return float(value)
    raise ValueError


def _real(value: Any) -> float:
    """Seconds or a share: no field may be negative."""
    number = _number(value)
    if number >= 0:
        return number
    raise ValueError


_SCALARS: dict[Any, Check] = {
    str: lambda value: _exactly(str, value),
    bool: lambda value: _exactly(bool, value),
    int: _whole,
    Signed: _signed,
    float: _real,
    Number: _number,
    object: lambda value: value,
}
