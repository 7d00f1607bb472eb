"""A configuration as a tree of nodes that know their place in the source.

Nodes keep the raw text of scalars, so that messages can show what the user wrote.
Also cuts text for messages, and expands ``${VAR}`` and ``${VAR:-default}``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from tfcluster.base.light_dataclasses import dataclass
from tfcluster.config.yaml11_scalars import read

MAX_PATH = 4096
"""How much of a path a message shows: the maximum on Linux (PATH_MAX)."""


def cut(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def printable(text: str, limit: int = 60) -> str:
    """``text`` cut, with unprintable characters escaped."""
    short = cut(text, limit)
    return short if short.isprintable() else repr(short)[1:-1]


_REFERENCE = re.compile(
    r"\$(?:"
    r"(?P<escape>\$)"
    r"|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^{}]*))?\}"
    r"|(?P<malformed>\{[^}]*\}?)"
    r"|(?P<bare>[A-Za-z_][A-Za-z0-9_]*)"
    r")"
)


class FillError(ValueError):
    """A reference that cannot be expanded; ``reference`` is its text."""

    def __init__(self, message: str, hint: str, reference: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.reference = reference


def fill(text: str, environ: Mapping[str, str], *, keep_bare: bool = False) -> str:
    """``text`` with its references expanded. Raises FillError.

    As in a shell, the default of ``:-`` also replaces a variable that is set but empty.
    ``keep_bare`` leaves ``$VAR`` alone, because the program may be a shell.
    """
    if "$" not in text:
        return text

    def filled(match: re.Match[str]) -> str:
        if match["escape"]:
            return "$"
        if match["bare"] and keep_bare:
            return match[0]
        if not match["name"]:
            raise _refusal(match)
        value = environ.get(match["name"])
        if match["default"] is not None:
            return value or match["default"]
        if value is None:
            name = match["name"]
            hint = f"use ${{{name}:-default}}, or $${{{name}}} for the text itself"
            raise FillError(f"${name} is not set here", hint, match[0])
        return value

    return _REFERENCE.sub(filled, text)


def _refusal(match: re.Match[str]) -> FillError:
    shown = printable(match[0], 40)
    if bare := match["bare"]:
        message = f"{shown} is not expanded: only ${{{bare[:39]}}} is"
        hint = f"write ${{{bare[:39]}}}, or ${shown} for the text itself"
        return FillError(message, hint, match[0])
    message = f"{shown} is not a supported reference"
    hint = "use ${VAR} or ${VAR:-default}; write $$ for one $"
    return FillError(message, hint, match[0])


Path: TypeAlias = tuple[str | int, ...]
"""Keys and list indices from the top of the tree."""
Keys: TypeAlias = tuple[str, ...]


class Mark(NamedTuple):
    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source

    def shifted(self, columns: int) -> Mark:
        return self._replace(column=self.column + columns) if self.line else self


class Scalar(NamedTuple):
    raw: str
    mark: Mark
    plain: bool = False
    """Whether it is neither quoted nor a block scalar, so that YAML may read it as
    another type than text."""
    inset: int | None = None
    """Columns from the mark to the text; None: the file has it in another form."""

    @property
    def value(self) -> object:
        return read(self.raw) if self.plain else self.raw

    def at(self, offset: int) -> Mark:
        """The place of the character at ``offset``, or of the scalar if unknown."""
        return (
            self.mark if self.inset is None else self.mark.shifted(self.inset + offset)
        )


class Seq(NamedTuple):
    items: Sequence[Node]
    mark: Mark


class Entry(NamedTuple):
    key: Scalar
    node: Node


class Map(NamedTuple):
    entries: Mapping[str, Entry]
    mark: Mark


Node: TypeAlias = Scalar | Seq | Map


def text(raw: str, mark: Mark) -> Scalar:
    return Scalar(raw, mark)


def mapping(mark: Mark, nodes: Mapping[str, Node]) -> Map:
    entries = {key: Entry(text(key, mark), node) for key, node in nodes.items()}
    return Map(entries, mark)


def at(root: Map, path: Keys) -> Node | None:
    place = find(root, path)
    return None if place.rest else place.node


def put(root: Map, path: Keys, node: Node) -> Map:
    """``root`` with ``node`` at ``path``, and with mappings where there is nothing on
    the way. The same ``root`` if something else than a mapping is on the way."""
    key, rest = path[0], path[1:]
    old = root.entries.get(key)
    if rest:
        below = old.node if old else Map({}, node.mark)
        if not isinstance(below, Map):
            return root
        node = put(below, rest, node)
    entry = Entry(old.key if old else text(key, node.mark), node)
    return Map({**root.entries, key: entry}, root.mark)


def without(root: Map, path: Keys) -> Map:
    *above, key = path
    holder = at(root, tuple(above))
    if not isinstance(holder, Map) or key not in holder.entries:
        return root
    entries = {name: entry for name, entry in holder.entries.items() if name != key}
    rest = Map(entries, holder.mark)
    return put(root, tuple(above), rest) if above else rest


def value(node: Node, shared: dict[int, Any] | None = None) -> Any:
    """The tree as Python objects; aliased nodes, in ``shared`` by id, become one."""
    if isinstance(node, Scalar):
        return node.value
    shared = {} if shared is None else shared
    if id(node) not in shared:
        shared[id(node)] = (
            [value(item, shared) for item in node.items]
            if isinstance(node, Seq)
            else {key: value(entry.node, shared) for key, entry in node.entries.items()}
        )
    return shared[id(node)]


def shown(node: Node) -> str:
    if isinstance(node, Map):
        return "a mapping"
    if isinstance(node, Seq):
        return "a list"
    return printable(node.raw) if node.plain else repr(cut(node.raw))


@dataclass(frozen=True, slots=True)
class Lookup:
    """The result of ``find``: how far a path leads into the tree."""

    node: Node
    key: Scalar | None
    """The key of the node; None for the root and for list items."""
    name: str
    """The node's name in messages: its key, or its list's key with the index."""
    rest: Path
    """The rest of the path; empty if the whole path was found."""


def find(root: Node, path: Path) -> Lookup:
    node, key, name = root, None, ""
    for depth, part in enumerate(path):
        if isinstance(node, Map) and isinstance(part, str) and part in node.entries:
            key, node = node.entries[part]
            name = part
        elif isinstance(node, Seq) and isinstance(part, int) and part < len(node.items):
            key, node = None, node.items[part]
            name = f"{name}[{part}]"
        elif isinstance(node, Seq) and depth + 1 < len(path):
            continue  # a list that stands for a mapping with this key
        else:
            return Lookup(node, key, name, path[depth:])
    return Lookup(node, key, name, ())


def origins(root: Map) -> dict[str, str]:
    """Dotted key -> the place of its value. A list is one value."""
    return {".".join(path): str(node.mark) for path, node in _leaves(root, ())}


def _leaves(
    node: Node, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Node]]:
    if isinstance(node, Map):
        for key, entry in node.entries.items():
            yield from _leaves(entry.node, (*path, key))
    else:
        yield path, node
