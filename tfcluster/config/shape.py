"""Describes sections and their keys, and checks values against them in one pass.

A section is a class whose attributes are keys. Kinds say what values a key takes; those
of single values are in ``field_types``. Knows neither keys nor messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from tfcluster.base.light_dataclasses import dataclass
from tfcluster.config.tree import Path

Json = dict[str, Any]
Shapes = dict[str, Json]
"""Name of a section's class -> the JSON Schema of the section."""
Sort = Literal[
    "bound", "empty", "missing", "refused", "type", "unfit", "unknown", "word"
]


@dataclass(frozen=True, slots=True)
class Wrong:
    """A mistake, without its place in the source."""

    path: Path
    sort: Sort
    what: str = ""
    """What a value must be; the whole message if it is refused."""
    hint: str | None = None
    words: Sequence[str] = ()
    """For a word: the known ones."""
    of_key: bool = False
    """Whether it is about the key at ``path``, not about the value."""


class Misfit(Exception):
    """A value that does not fit its kind; ``what`` and ``hint`` are as in Wrong."""

    def __init__(
        self,
        what: str,
        hint: str | None = None,
        sort: Sort = "unfit",
        words: Sequence[str] = (),
    ) -> None:
        super().__init__(what)
        self.what, self.hint, self.sort, self.words = what, hint, sort, words

    def at(self, path: Path, *, of_key: bool = False) -> Wrong:
        return Wrong(path, self.sort, self.what, self.hint, self.words, of_key)


def mistyped(what: str) -> Misfit:
    return Misfit(what, sort="type")


class Kind(Protocol):
    """What values a key takes."""

    def read(self, value: object, path: Path, wrong: list[Wrong]) -> Any:
        """What the value means; if it is invalid, notes why, and returns anything."""

    def json(self, shapes: Shapes) -> Json:
        """The JSON Schema of the values; adds sections to ``shapes``."""


@dataclass(frozen=True, slots=True)
class Plain:
    """Single values; ``check`` returns what one means, or raises Misfit."""

    check: Callable[[Any], Any]
    schema: Mapping[str, Any]

    def read(self, value: object, path: Path, wrong: list[Wrong]) -> Any:
        try:
            return self.check(value)
        except Misfit as unfit:
            wrong.append(unfit.at(path))

    def json(self, shapes: Shapes) -> Json:
        return dict(self.schema)


@dataclass(frozen=True, slots=True)
class ListShape:
    item: Kind
    filled: bool = False
    """Whether it must not be empty."""

    def read(self, value: object, path: Path, wrong: list[Wrong]) -> Any:
        if not isinstance(value, list):
            wrong.append(mistyped("a list").at(path))
            return []
        if self.filled and not value:
            wrong.append(Wrong(path, "empty"))
        return [
            self.item.read(each, (*path, at), wrong) for at, each in enumerate(value)
        ]

    def json(self, shapes: Shapes) -> Json:
        found = {"type": "array", "items": self.item.json(shapes)}
        return {**found, "minItems": 1} if self.filled else found


@dataclass(frozen=True, slots=True)
class MapOf:
    key: Plain
    item: Kind
    properties: Mapping[str, Any] | None = None
    """The JSON Schema of keys that have a meaning of their own."""

    def read(self, value: object, path: Path, wrong: list[Wrong]) -> Any:
        if not isinstance(value, dict):
            wrong.append(mistyped("a mapping").at(path))
            return {}
        for key in value:
            try:
                self.key.check(key)
            except Misfit as unfit:
                wrong.append(unfit.at((*path, key), of_key=True))
        return {k: self.item.read(v, (*path, k), wrong) for k, v in value.items()}

    def json(self, shapes: Shapes) -> Json:
        found = {"type": "object", "additionalProperties": self.item.json(shapes)}
        return {**found, "properties": self.properties} if self.properties else found


@dataclass(frozen=True, slots=True)
class Widened:
    """Another kind, and values that ``widen`` turns into values of that kind."""

    kind: Kind
    widen: Callable[[Any], object]
    schema: Mapping[str, Any]

    def read(self, value: object, path: Path, wrong: list[Wrong]) -> Any:
        try:
            wide = self.widen(value)
        except Misfit as unfit:
            wrong.append(unfit.at(path))
            return None
        return self.kind.read(wide, path, wrong)

    def json(self, shapes: Shapes) -> Json:
        return {"anyOf": [self.schema, self.kind.json(shapes)]}


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a section."""

    kind: Kind
    about: str
    default: Any = None
    """As in the file; None: it is left out."""
    required: bool = False
    shown: Any = None
    """The default as people write it, if that is not the same."""

    def json(self, shapes: Shapes) -> Json:
        shown = self.default if self.shown is None else self.shown
        default = {} if shown is None else {"default": shown}
        return {**self.kind.json(shapes), **default, "description": self.about}


def key(kind: Kind, default: Any, about: str, *, shown: Any = None) -> Any:
    return Key(kind, about, default, shown=shown)


def optional(kind: Kind, about: str) -> Any:
    return Key(kind, about)


def required(kind: Kind, about: str) -> Any:
    return Key(kind, about, required=True)


class Section:
    """A mapping with known keys. An object has the values as attributes."""

    known: ClassVar[dict[str, Key]] = {}

    def __init_subclass__(cls) -> None:
        own = {name: each for name, each in vars(cls).items() if isinstance(each, Key)}
        cls.known = {**cls.known, **own}

    def __init__(self, values: Mapping[str, Any]) -> None:
        vars(self).update(values)


AnySection = TypeVar("AnySection", bound=Section)


@dataclass(frozen=True, slots=True)
class Nested:
    """The values of a section."""

    section: type[Section]

    def read(self, value: object, path: Path, wrong: list[Wrong]) -> Any:
        return read(self.section, value, path, wrong)

    def json(self, shapes: Shapes) -> Json:
        name = self.section.__name__
        if name not in shapes:
            shapes[name] = {}  # keeps its place
            shapes[name] = section_json(self.section, shapes)
        return {"$ref": f"#/$defs/{name}"}


def read(
    section: type[AnySection], value: object, path: Path, wrong: list[Wrong]
) -> AnySection:
    """The section that a mapping describes; mistakes go to ``wrong``."""
    if not isinstance(value, dict):
        wrong.append(mistyped("a mapping").at(path))
        return section({})
    values = {}
    for name, each in section.known.items():
        below = (*path, name)
        if name in value:
            values[name] = each.kind.read(value[name], below, wrong)
        elif each.required:
            wrong.append(Wrong(below, "missing"))
        else:
            given = each.default
            values[name] = (
                None if given is None else each.kind.read(given, below, wrong)
            )
    wrong.extend(Wrong((*path, k), "unknown") for k in value if k not in section.known)
    return section(values)


def section_json(section: type[Section], shapes: Shapes) -> Json:
    """The JSON Schema of a section; those below it go to ``shapes``."""
    needed = [name for name, each in section.known.items() if each.required]
    return {
        "type": "object",
        "description": " ".join((section.__doc__ or "").split()),
        "properties": {name: each.json(shapes) for name, each in section.known.items()},
        **({"required": needed} if needed else {}),
        "additionalProperties": False,
    }
