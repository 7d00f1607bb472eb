"""Describes sections and their keys, and checks values against them in one pass.

A section is a class whose attributes are keys. Kinds say what values a key takes; those
of single values are in ``field_types``. Knows neither keys nor messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from tfcluster.base.light_dataclasses import dataclass, field
from tfcluster.config.tree import Path

Json = dict[str, Any]
Shapes = dict[str, Json]
"""Name of a section's class -> the JSON Schema of the section."""
Sort = Literal[
    "bound", "empty", "missing", "refused", "type", "unfit", "unknown", "word"
]
INVALID: Any = object()
"""Stands for the meaning of a value that does not fit its kind."""


class Misfit(Exception):
    """A value that does not fit its kind, or a key that is unknown or missing."""

    def __init__(
        self,
        what: str = "",
        hint: str | None = None,
        sort: Sort = "unfit",
        words: Sequence[str] = (),
    ) -> None:
        super().__init__(what)
        self.what = what
        """What a value must be; the whole message if it is refused."""
        self.hint = hint
        self.sort = sort
        self.words = words
        """The words that are possible here."""
        self.path: Path = ()
        self.of_key = False
        """Whether it is about the key at ``path``, not about the value."""
        self.section: type[Section] | None = None
        """The section that has no such key."""


def mistyped(what: str) -> Misfit:
    return Misfit(what, sort="type")


@dataclass(slots=True)
class Mistakes:
    """What is wrong with a configuration, and what was left out because of it."""

    misfits: list[Misfit] = field(default_factory=list)
    left_out: dict[Path, set[int]] = field(default_factory=dict)
    """Path of a list -> indices of its items that were left out."""

    def note(self, misfit: Misfit, path: Path) -> Any:
        misfit.path = path
        self.misfits.append(misfit)
        return INVALID


class Kind(Protocol):
    """What values a key takes."""

    def read(self, value: object, path: Path, mistakes: Mistakes) -> Any:
        """What the value means; if it means nothing, notes why, and is INVALID."""

    def json(self, shapes: Shapes) -> Json:
        """The JSON Schema of the values; adds sections to ``shapes``."""


@dataclass(frozen=True, slots=True)
class Plain:
    """Single values; ``check`` returns what one means, or raises Misfit."""

    check: Callable[[Any], Any]
    schema: Mapping[str, Any]

    def read(self, value: object, path: Path, mistakes: Mistakes) -> Any:
        try:
            return self.check(value)
        except Misfit as misfit:
            return mistakes.note(misfit, path)

    def json(self, shapes: Shapes) -> Json:
        return dict(self.schema)


@dataclass(frozen=True, slots=True)
class ListShape:
    """Lists, without the items that are invalid."""

    item: Kind
    filled: bool = False
    """Whether it must not be empty."""

    def read(self, value: object, path: Path, mistakes: Mistakes) -> Any:
        if not isinstance(value, list):
            return mistakes.note(mistyped("a list"), path)
        if self.filled and not value:
            return mistakes.note(Misfit(sort="empty"), path)
        items = [
            self.item.read(item, (*path, at), mistakes) for at, item in enumerate(value)
        ]
        if gaps := {at for at, item in enumerate(items) if item is INVALID}:
            mistakes.left_out[path] = gaps
        return [item for item in items if item is not INVALID]

    def json(self, shapes: Shapes) -> Json:
        schema = {"type": "array", "items": self.item.json(shapes)}
        return {**schema, "minItems": 1} if self.filled else schema


@dataclass(frozen=True, slots=True)
class MapOf:
    """Mappings with any keys, without the entries that are invalid."""

    key: Plain
    item: Kind
    properties: Mapping[str, Any] | None = None
    """The JSON Schema of keys that have a meaning of their own."""

    def read(self, value: object, path: Path, mistakes: Mistakes) -> Any:
        if not isinstance(value, dict):
            return mistakes.note(mistyped("a mapping"), path)
        entries = {}
        for key, item in value.items():
            below = (*path, key)
            meaning = self.item.read(item, below, mistakes)
            try:
                self.key.check(key)
            except Misfit as misfit:
                misfit.of_key = True
                meaning = mistakes.note(misfit, below)
            if meaning is not INVALID:
                entries[key] = meaning
        return entries

    def json(self, shapes: Shapes) -> Json:
        schema = {"type": "object", "additionalProperties": self.item.json(shapes)}
        return {**schema, "properties": self.properties} if self.properties else schema


@dataclass(frozen=True, slots=True)
class Widened:
    """Another kind, and values that ``widen`` turns into values of that kind."""

    kind: Kind
    widen: Callable[[Any], object]
    schema: Mapping[str, Any]

    def read(self, value: object, path: Path, mistakes: Mistakes) -> Any:
        try:
            wide = self.widen(value)
        except Misfit as misfit:
            return mistakes.note(misfit, path)
        return self.kind.read(wide, path, mistakes)

    def json(self, shapes: Shapes) -> Json:
        return {"anyOf": [self.schema, self.kind.json(shapes)]}


@dataclass(frozen=True, slots=True)
class Key:
    kind: Kind
    about: str
    default: Any = None
    """As in the file; None: it is left out."""
    required: bool = False
    shown: Any = None
    """The default as people write it, if that is not the same."""

    def json(self, shapes: Shapes) -> Json:
        shown = self.default if self.shown is None else self.shown
        default = {} if shown is None or self.required else {"default": shown}
        return {**self.kind.json(shapes), **default, "description": self.about}


def key(kind: Kind, default: Any, about: str, *, shown: Any = None) -> Any:
    return Key(kind, about, default, shown=shown)


def optional(kind: Kind, about: str) -> Any:
    return Key(kind, about)


def required(kind: Kind, about: str, default: Any = None) -> Any:
    """A key that must be there; without a ``default``, the section is invalid, too."""
    return Key(kind, about, default, required=True)


class Section:
    """A mapping with fixed keys. An object has the values as attributes.

    If the section has a ``shorthand``, a plain value stands for a mapping with this one
    key: ``worker: 3``.
    """

    keys: ClassVar[dict[str, Key]] = {}
    shorthand: ClassVar[str | None] = None

    def __init_subclass__(cls, shorthand: str | None = None) -> None:
        cls.shorthand = shorthand
        own = {name: key for name, key in vars(cls).items() if isinstance(key, Key)}
        cls.keys = {**cls.keys, **own}

    def __init__(self, values: Mapping[str, Any]) -> None:
        vars(self).update(values)


AnySection = TypeVar("AnySection", bound=Section)


@dataclass(frozen=True, slots=True)
class Nested:
    section: type[Section]

    def read(self, value: object, path: Path, mistakes: Mistakes) -> Any:
        return read(self.section, value, path, mistakes)

    def json(self, shapes: Shapes) -> Json:
        name = self.section.__name__
        if name not in shapes:
            shapes[name] = {}  # keeps its place
            shapes[name] = section_json(self.section, shapes)
        whole = {"$ref": f"#/$defs/{name}"}
        if self.section.shorthand is None:
            return whole
        plain = self.section.keys[self.section.shorthand].kind.json(shapes)
        return {"anyOf": [plain, whole]}


def read(
    section: type[AnySection], value: object, path: Path, mistakes: Mistakes
) -> AnySection:
    """The section of a mapping, or INVALID; defaults replace invalid values."""
    if (short := section.shorthand) and not isinstance(value, dict):
        takes_list = isinstance(section.keys[short].kind, ListShape)
        if takes_list or not isinstance(value, list):
            value = {short: value}
    if not isinstance(value, dict):
        return mistakes.note(mistyped("a mapping"), path)  # type: ignore[no-any-return]
    values, valid = {}, True
    for name, key in section.keys.items():
        below, meaning = (*path, name), INVALID
        if name in value:
            meaning = key.kind.read(value[name], below, mistakes)
        elif key.required:
            mistakes.note(Misfit(sort="missing"), below)
        if meaning is INVALID and key.default is not None:
            meaning = key.kind.read(key.default, below, mistakes)
        elif meaning is INVALID:
            valid, meaning = valid and not key.required, None
        values[name] = meaning
    for name in value:
        if name not in section.keys:
            misfit = Misfit(sort="unknown")
            misfit.of_key, misfit.section = True, section
            mistakes.note(misfit, (*path, name))
    return section(values) if valid else INVALID


def section_json(section: type[Section], shapes: Shapes) -> Json:
    needed = [name for name, key in section.keys.items() if key.required]
    return {
        "type": "object",
        "description": " ".join((section.__doc__ or "").split()),
        "properties": {name: key.json(shapes) for name, key in section.keys.items()},
        **({"required": needed} if needed else {}),
        "additionalProperties": False,
    }
