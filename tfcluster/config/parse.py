"""Parses YAML into a tree: strict, bounded, and without anything that YAML could run.

Refuses tags, second documents, duplicate keys and alias bombs. Works on the parser's
events, without recursion, so that even the deepest input is refused properly. Knows no
keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from tfcluster.config.diagnostics import Report
from tfcluster.config.syntax import MAX_DEPTH, explain
from tfcluster.config.tree import Entry, Map, Mark, Node, Scalar, Seq

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
    """The tree of a text; None if it is empty.

    ``source`` is a file, or a flag, whose nodes have no separate lines.
    Problems go to ``report``; raises ConfigError if the rest cannot be parsed.
    """
    located = bool(source.line)
    if unprintable := _UNPRINTABLE.search(content):
        before = content[: unprintable.start()]
        line = before.count("\n")
        column = len(before) - (before.rfind("\n") + 1)
        mark = Mark(source.source, line + 1, column + 1) if located else source
        code = f"U+{ord(unprintable[0]):04X}"
        raise report.failed(mark, f"control character {code}", "is this a text file?")
    builder = _Builder(source, report, located=located)
    try:
        for event in _events(content):
            builder.take(event)
    except yaml.YAMLError as error:
        line, column, message, hint = explain(error, content)
        mark = Mark(source.source, line, column) if located else source
        raise report.failed(mark, message, hint) from error
    return builder.root


def _events(content: str) -> Iterator[Any]:
    # yaml's type stubs leave this generator untyped.
    yield from yaml.parse(content, Loader=_LOADER)


class _Open:
    """A collection that is not complete yet."""

    def __init__(self, mark: Mark, anchor: str | None, *, is_map: bool) -> None:
        self.mark = mark
        self.anchor = anchor
        self.is_map = is_map
        self.items: list[Node] = []
        self.entries: dict[str, Entry] = {}
        self.merged: list[Map] = []
        self.key: Scalar | None = None
        self.nodes_before = 0


class _Builder:
    """Takes events one by one; after the last one, ``root`` is the tree."""

    def __init__(self, source: Mark, report: Report, *, located: bool) -> None:
        self.root: Node | None = None
        self._source = source
        self._report = report
        self._located = located
        self._stack: list[_Open] = []
        self._anchors: dict[str, tuple[Node, int]] = {}
        self._aliases = 0
        self._nodes = 0
        self._documents = 0

    def take(self, event: Any) -> None:
        if isinstance(event, yaml.ScalarEvent):
            self._scalar(event)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            self._open(event)
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            self._close()
        elif isinstance(event, yaml.AliasEvent):
            self._alias(event)
        elif isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                hint = "remove the '---' and all that follows"
                message = "a second document; only one is allowed"
                raise self._report.failed(self._mark(event), message, hint)

    def _mark(self, event: Any) -> Mark:
        if not self._located:
            return self._source
        start = event.start_mark
        return Mark(self._source.source, start.line + 1, start.column + 1)

    def _scalar(self, event: Any) -> None:
        mark = self._mark(event)
        self._refuse_tag(event, mark)
        plain, inset = not event.style, None
        start, end = event.start_mark, event.end_mark
        if start.line == end.line:
            around = end.column - start.column - len(event.value)
            inset = around // 2 if around in (0, 2) else None
        if forbidden := _FORBIDDEN.search(event.value):
            message = f"a value cannot hold U+{ord(forbidden[0]):04X}"
            self._report.error(mark, message)
        node = Scalar(event.value, mark, plain, inset)
        self._nodes += 1
        if event.anchor:
            self._anchors[event.anchor] = (node, 1)
        self._add(node)

    def _open(self, event: Any) -> None:
        mark = self._mark(event)
        self._refuse_tag(event, mark)
        if len(self._stack) >= MAX_DEPTH:
            raise self._report.failed(mark, f"nested deeper than {MAX_DEPTH}")
        is_map = isinstance(event, yaml.MappingStartEvent)
        opened = _Open(mark, event.anchor, is_map=is_map)
        opened.nodes_before = self._nodes
        self._nodes += 1
        self._stack.append(opened)

    def _close(self) -> None:
        closed = self._stack.pop()
        node: Node
        if closed.is_map:
            for base in closed.merged:
                for key, entry in base.entries.items():
                    closed.entries.setdefault(key, entry)
            node = Map(closed.entries, closed.mark)
        else:
            node = Seq(closed.items, closed.mark)
        if closed.anchor:
            size = self._nodes - closed.nodes_before
            self._anchors[closed.anchor] = (node, size)
        self._add(node)

    def _alias(self, event: Any) -> None:
        mark, name = self._mark(event), event.anchor
        if any(opened.anchor == name for opened in self._stack):
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
        self._add(node)

    def _refuse_tag(self, event: Any, mark: Mark) -> None:
        if event.tag is not None:
            hint = "quote the value if the '!' belongs to it"
            self._report.error(mark, "YAML tags are not allowed", hint)

    def _add(self, node: Node) -> None:
        """Add a complete node to the open collection."""
        if not self._stack:
            self.root = node
            return
        opened = self._stack[-1]
        if not opened.is_map:
            opened.items.append(node)
        elif opened.key is None:
            opened.key = self._as_key(node)
        else:
            key, opened.key = opened.key, None
            self._add_entry(opened, key, node)

    def _as_key(self, node: Node) -> Scalar:
        if isinstance(node, Scalar):
            return node
        if isinstance(node, Seq):
            raise self._report.failed(node.mark, "a key must be text")
        # For YAML, `{{ user }}` is a mapping whose key is a mapping.
        message = "templates like '{{ x }}' are not supported"
        raise self._report.failed(node.mark, message, "quote it, or use ${VAR}")

    def _add_entry(self, opened: _Open, key: Scalar, node: Node) -> None:
        if key.raw == "<<" and key.plain:
            bases = node.items if isinstance(node, Seq) else [node]
            for base in bases:
                if isinstance(base, Map):
                    opened.merged.append(base)
                else:
                    self._report.error(base.mark, "'<<' takes a mapping: <<: *name")
        elif earlier := opened.entries.get(key.raw):
            first = earlier.key.mark
            where = f"{first.line}:{first.column}" if first.line else str(first)
            self._report.error(key.mark, f"{key.raw!r} already set at {where}")
        else:
            opened.entries[key.raw] = Entry(key, node)
