"""Values for the fields of frames, by their annotations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, get_type_hints

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tfcluster.base.light_dataclasses import Struct
from tfcluster.protocol.frames import Number, Signed, encode, leaves
from tfcluster.protocol.wire import Frame, parse

_EXAMPLES: Mapping[Any, object] = {
    str: "a",
    int: 3,
    Signed: -3,
    bool: True,
    float: 0.5,
    Number: -0.5,
    object: {"type": "step"},
}
_STRATEGIES: Mapping[Any, SearchStrategy[Any]] = {
    str: st.text(),
    int: st.integers(0, (1 << 64) - 1),
    Signed: st.integers(-(1 << 63), (1 << 63) - 1),
    bool: st.booleans(),
    float: st.floats(0, allow_nan=False, allow_infinity=False),
    Number: st.floats(allow_nan=False, allow_infinity=False),
    object: st.none() | st.text() | st.lists(st.integers()),
}


def fields(cls: type) -> dict[str, Any]:
    """Name -> type of each field, in order."""
    return get_type_hints(cls)


def values(kind: Any) -> SearchStrategy[Any]:
    """All values of this type that a frame can have."""
    if kind in _STRATEGIES:
        return _STRATEGIES[kind]
    args: tuple[Any, ...] = getattr(kind, "__args__", ())
    if isinstance(kind, UnionType):
        return st.none() | values(args[0])
    origin = getattr(kind, "__origin__", None)
    if origin is Mapping:
        return st.dictionaries(st.text(), values(args[1]), max_size=3)
    if origin is tuple and args[-1] is ...:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, args))
    return st.builds(kind, **{name: values(of) for name, of in fields(kind).items()})


def example(kind: Any, **given: object) -> Any:
    """One value of this type, with something in every field that is not given."""
    if kind in _EXAMPLES:
        return _EXAMPLES[kind]
    args: tuple[Any, ...] = getattr(kind, "__args__", ())
    origin = getattr(kind, "__origin__", None)
    if isinstance(kind, UnionType):
        return example(args[0])
    if origin is Mapping:
        return {"A": example(args[1])}
    if origin is tuple:
        return tuple(example(each) for each in args if each is not ...)
    made = {name: example(of) for name, of in fields(kind).items() if name not in given}
    return kind(**made, **given)


def examples(base: type[Struct]) -> Iterator[Frame]:
    """A frame of each class below ``base``."""
    for cls in leaves(base):
        yield parse(encode(example(cls)))
