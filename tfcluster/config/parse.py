"""Parses YAML into a tree: strict, bounded, and without anything that YAML could run.

Refuses tags, second documents, duplicate keys and alias bombs. Works on the parser's
events, so that the deepest input is refused before it is read. Knows no keys.

Explains syntax errors to the author of the file. libyaml and PyYAML have different
messages for the same errors, so they are mostly recognised by the text at their place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from tfcluster.config.diagnostics import Report
from tfcluster.config.tree import Entry, Map, Mark, Node, Scalar, Seq
from tfcluster.plan.host_patterns import MAX_NAME_LENGTH

MAX_DEPTH = 50
"""The limit of nested collections."""
MAX_ALIASES = 1000
MAX_NODES = 1_000_000
"""The limit of nodes; an aliased node counts again for every alias."""

_LOADER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# Characters that YAML does not allow in a file (its `c-printable`).
_UNPRINTABLE = re.compile(
    "[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
)
# Characters that no value may have, even from an escape like "\0".
_FORBIDDEN = re.compile("[\0\ud800-\udfff]")


def parse(content: str, source: Mark, report: Report) -> Node | None:
    """The tree of a file or flag, None if it is empty. May raise ConfigError."""
    located = bool(source.line)
    if unprintable := _UNPRINTABLE.search(content):
        before = content[: unprintable.start()]
        line = before.count("\n")
        column = len(before) - (before.rfind("\n") + 1)
        mark = Mark(source.source, line + 1, column + 1) if located else source
        code = f"U+{ord(unprintable[0]):04X}"
        raise report.failed(mark, f"control character {code}", "is this a text file?")
    try:
        return _Builder(content, source, report, located=located).root()
    except yaml.YAMLError as error:
        line, column, message, hint = _explained(error, content)
        mark = Mark(source.source, line, column) if located else source
        raise report.failed(mark, message, hint) from error


class _Builder:
    def __init__(
        self, content: str, source: Mark, report: Report, *, located: bool
    ) -> None:
        # yaml's type stubs leave this generator untyped.
        self._events: Iterator[Any] = yaml.parse(content, Loader=_LOADER)
        self._source = source
        self._report = report
        self._located = located
        self._open: list[str | None] = []
        """The anchors of the collections that are not complete yet."""
        self._anchors: dict[str, tuple[Node, int]] = {}
        """Anchor -> the node, and how many nodes it consists of."""
        self._aliases = 0
        self._nodes = 0

    def root(self) -> Node | None:
        root, documents = None, 0
        for event in self._events:
            if isinstance(event, yaml.NodeEvent):
                root = self._node(event)
            elif isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    hint = "remove the '---' and all that follows"
                    message = "a second document; only one is allowed"
                    raise self._report.failed(self._mark(event), message, hint)
        return root

    def _mark(self, event: Any) -> Mark:
        if not self._located:
            return self._source
        start = event.start_mark
        return Mark(self._source.source, start.line + 1, start.column + 1)

    def _node(self, event: Any) -> Node:
        mark = self._mark(event)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(str(event.anchor), mark)
        if event.tag is not None:
            hint = "quote the value if the '!' belongs to it"
            self._report.error(mark, "YAML tags are not allowed", hint)
        before = self._nodes
        self._nodes += 1
        node: Node
        if isinstance(event, yaml.ScalarEvent):
            node = self._scalar(event, mark)
        else:
            if len(self._open) >= MAX_DEPTH:
                raise self._report.failed(mark, f"nested deeper than {MAX_DEPTH}")
            self._open.append(event.anchor)
            is_map = isinstance(event, yaml.MappingStartEvent)
            node = self._mapping(mark) if is_map else Seq(list(self._items()), mark)
            self._open.pop()
        if event.anchor:
            self._anchors[event.anchor] = (node, self._nodes - before)
        return node

    def _scalar(self, event: Any, mark: Mark) -> Scalar:
        inset, start, end = None, event.start_mark, event.end_mark
        if start.line == end.line:
            around = end.column - start.column - len(event.value)
            inset = around // 2 if around in (0, 2) else None
        if forbidden := _FORBIDDEN.search(event.value):
            message = f"a value cannot hold U+{ord(forbidden[0]):04X}"
            self._report.error(mark, message)
        return Scalar(event.value, mark, not event.style, inset)

    def _alias(self, name: str, mark: Mark) -> Node:
        if name in self._open:
            raise self._report.failed(mark, f"alias '*{name}' refers to itself")
        if name not in self._anchors:
            hint = f"quote it if '*{name}' is meant as text"
            raise self._report.failed(
                mark, f"alias '*{name}' has no anchor '&{name}'", hint
            )
        self._aliases += 1
        if self._aliases > MAX_ALIASES:
            raise self._report.failed(mark, f"too many aliases (limit {MAX_ALIASES})")
        node, size = self._anchors[name]
        self._nodes += size
        if self._nodes > MAX_NODES:
            message = f"aliases expand to more than {MAX_NODES} values"
            raise self._report.failed(mark, message)
        return node

    def _items(self) -> Iterator[Node]:
        for event in self._events:
            if isinstance(event, yaml.CollectionEndEvent):
                return
            yield self._node(event)

    def _mapping(self, mark: Mark) -> Map:
        entries: dict[str, Entry] = {}
        bases: list[Node] = []
        items = self._items()
        for key_node in items:
            key, node = self._as_key(key_node), next(items)
            if key.raw == "<<" and key.plain:
                bases += node.items if isinstance(node, Seq) else [node]
            elif earlier := entries.get(key.raw):
                first = earlier.key.mark
                where = f"{first.line}:{first.column}" if first.line else str(first)
                self._report.error(key.mark, f"{key.raw!r} already set at {where}")
            else:
                entries[key.raw] = Entry(key, node)
        for base in bases:
            if isinstance(base, Map):
                entries = {**base.entries, **entries}
            else:
                self._report.error(base.mark, "'<<' takes a mapping: <<: *name")
        return Map(entries, mark)

    def _as_key(self, node: Node) -> Scalar:
        if isinstance(node, Scalar):
            return node
        if isinstance(node, Seq):
            raise self._report.failed(node.mark, "a key must be text")
        # For YAML, `{{ user }}` is a mapping whose key is a mapping.
        message = "templates like '{{ x }}' are not supported"
        raise self._report.failed(node.mark, message, "quote it, or use ${VAR}")


# In node[1-4], YAML begins a list at the bracket.
_HOSTLIST_BEGIN = re.compile(r"[A-Za-z0-9_][\w.-]*$")
_HOSTLIST_REST = re.compile(r"(?:\[[0-9,-]*\][\w.-]*)+")
_LINE_END = re.compile("\r\n|[\r\n\x85\u2028\u2029]")
_NOT_A_START = "@`%*&!|>"


class _Explained(NamedTuple):
    line: int
    column: int
    message: str
    hint: str | None = None


class _Place(NamedTuple):
    line: int
    column: int
    before: str
    after: str

    @property
    def where(self) -> str:
        return f"{self.line}:{self.column}"

    def explained(
        self, message: str, hint: str | None = None, *, column: int | None = None
    ) -> _Explained:
        return _Explained(self.line, column or self.column, message, hint)


def _explained(error: yaml.YAMLError, content: str) -> _Explained:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return _Explained(1, 1, "not valid YAML")
    lines = _LINE_END.split(content)
    problem = error.problem or ""
    at = _place(error.problem_mark, lines)
    begun = _place(error.context_mark, lines) if error.context_mark else at
    return (
        _tab(at)
        or _depth(problem, at)
        or _quotes(error.context or "", problem, begun, at)
        or _first_character(problem, begun, at)
        or _colon(problem, at)
        or _brackets(error.context or "", begun, at)
        or _indentation(error.context or "", problem, begun, at)
        or at.explained(f"not valid YAML: {problem}")
    )


def _depth(problem: str, at: _Place) -> _Explained | None:
    # libyaml has its own limit, which it may reach before we see the first collections.
    if "nesting depth" not in problem:
        return None
    return at.explained(f"nested deeper than {MAX_DEPTH}")


def _place(mark: yaml.Mark, lines: list[str]) -> _Place:
    text = lines[mark.line] if mark.line < len(lines) else ""
    before, after = text[: mark.column], text[mark.column :]
    return _Place(mark.line + 1, mark.column + 1, before, after)


def _tab(at: _Place) -> _Explained | None:
    line = at.before + at.after
    indent = line[: len(line) - len(line.lstrip())]
    if "\t" not in indent or at.column > len(indent) + 1:
        return None
    column = indent.index("\t") + 1
    return at.explained("tab used for indentation", "use spaces", column=column)


def _quotes(context: str, problem: str, begun: _Place, at: _Place) -> _Explained | None:
    if "quoted scalar" not in context:
        return None
    quote = begun.after[:1]
    if "end of stream" in problem or "document" in problem:
        return begun.explained(f"the quote {quote} opened here is not closed")
    hint = "within \"...\" a backslash is written \\\\; or use '...'"
    # libyaml points at the backslash, PyYAML after it.
    column = at.column if at.after.startswith("\\") else at.column - 1
    return at.explained("unknown escape after '\\'", hint, column=column)


def _first_character(problem: str, begun: _Place, at: _Place) -> _Explained | None:
    start = at if "cannot start" in problem else begun
    character = start.after[:1]
    if not character or character not in _NOT_A_START:
        return None
    message = f"a value cannot start with {character!r} unquoted"
    return start.explained(message, "quote it")


def _colon(problem: str, at: _Place) -> _Explained | None:
    if "mapping values are not allowed" in problem:
        if ":" in at.before or "- " in at.before:
            message = "a second ': ' in a value"
            return at.explained(message, 'quote the value: "..."')
        indent = len(at.before) - len(at.before.lstrip()) + 1
        message = "this key is indented deeper than the one before it"
        hint = "a key that has a value cannot have keys below it"
        return at.explained(message, hint, column=indent)
    if "could not find expected ':'" in problem:
        # The mark is after the word that the author meant as a key.
        message = "there is a key without ':' before this line"
        return at.explained(message, "write KEY: VALUE")
    if "entries are not allowed" in problem:
        message = "a list cannot begin on the line of its key"
        hint = "put each '- item' on its own line, or write [item, ...]"
        return at.explained(message, hint)
    return None


def _brackets(context: str, begun: _Place, at: _Place) -> _Explained | None:
    for kind, opening, closing in (("sequence", "[", "]"), ("mapping", "{", "}")):
        if f"flow {kind}" not in context:
            continue
        if hosts := _hostlist(at):
            return hosts
        if at.after.strip():
            message = (
                f"expected ',' or '{closing}' in the {kind} begun at {begun.where}"
            )
            return at.explained(message)
        return begun.explained(f"'{opening}' is not closed by '{closing}'")
    if "flow" in context and not at.after:
        return at.explained("a '[' or '{' is not closed")
    if at.after[:1] in ("]", "}") and at.after:
        return at.explained(f"{at.after[0]!r} has no opening bracket")
    return None


def _hostlist(at: _Place) -> _Explained | None:
    """``node[1-4]`` in a flow list or mapping, where brackets must be quoted."""
    skipped = max(0, len(at.before) - MAX_NAME_LENGTH)
    begun = _HOSTLIST_BEGIN.search(at.before[skipped:])
    rest = _HOSTLIST_REST.match(at.after)
    if begun is None or rest is None:
        return None
    word = begun[0] + rest[0]
    message = f"{word} has brackets, so it must be quoted here"
    column = skipped + begun.start() + 1
    return at.explained(message, f'write "{word}"', column=column)


def _indentation(
    context: str, problem: str, begun: _Place, at: _Place
) -> _Explained | None:
    if "block" not in context:
        return None
    kind = "list" if "collection" in context else "mapping"
    if at.before.strip():
        quote = at.before.rstrip()[-1:]
        hint = None
        if quote in ("'", '"'):
            hint = f"a {quote} within {quote}...{quote} ends the text"
        return at.explained("text after the end of a value", hint)
    what = "'-'" if at.after.startswith("-") else "this line"
    if at.column == begun.column:
        wanted = "a key of the mapping" if kind == "mapping" else "'-' of the list"
        but = ", found '-'" if at.after.startswith("-") else ""
        message = f"expected {wanted} begun at {begun.where}{but}"
        return at.explained(message, "check the indentation")
    depth = "less than" if at.column < begun.column else "differently from"
    message = f"{what} is indented {depth} the {kind} begun at {begun.where}"
    return at.explained(message, "check the indentation")
