"""Explains YAML syntax errors to the author of the file.

libyaml and PyYAML have different messages for the same errors, so errors are mostly
recognised by the text at their place.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import yaml

from tfcluster.host_patterns import MAX_NAME_LENGTH

MAX_DEPTH = 50
"""The limit of nested collections."""

# In node[1-4], YAML begins a list at the bracket.
_HOSTLIST_BEGIN = re.compile(r"[A-Za-z0-9_][\w.-]*$")
_HOSTLIST_REST = re.compile(r"(?:\[[0-9,-]*\][\w.-]*)+")
_LINE_END = re.compile("\r\n|[\r\n\x85\u2028\u2029]")
_NOT_A_START = "@`%*&!|>"


class Explained(NamedTuple):
    line: int
    column: int
    message: str
    hint: str | None = None


class _Place(NamedTuple):
    """A mark with the text before and after it; line and column count from 1."""

    line: int
    column: int
    before: str
    after: str

    @property
    def where(self) -> str:
        return f"{self.line}:{self.column}"


def explain(error: yaml.YAMLError, content: str) -> Explained:
    """The place of the error, a message, and a hint."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return Explained(1, 1, "not valid YAML")
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
        or Explained(at.line, at.column, f"not valid YAML: {problem}")
    )


def _depth(problem: str, at: _Place) -> Explained | None:
    # libyaml has its own limit, which it may reach before we see the first collections.
    if "nesting depth" not in problem:
        return None
    return Explained(at.line, at.column, f"nested deeper than {MAX_DEPTH}")


def _place(mark: yaml.Mark, lines: list[str]) -> _Place:
    text = lines[mark.line] if mark.line < len(lines) else ""
    before, after = text[: mark.column], text[mark.column :]
    return _Place(mark.line + 1, mark.column + 1, before, after)


def _tab(at: _Place) -> Explained | None:
    line = at.before + at.after
    indent = line[: len(line) - len(line.lstrip())]
    if "\t" not in indent or at.column > len(indent) + 1:
        return None
    column = indent.index("\t") + 1
    return Explained(at.line, column, "tab used for indentation", "use spaces")


def _quotes(context: str, problem: str, begun: _Place, at: _Place) -> Explained | None:
    if "quoted scalar" not in context:
        return None
    quote = begun.after[:1]
    if "end of stream" in problem or "document" in problem:
        message = f"the quote {quote} opened here is not closed"
        return Explained(begun.line, begun.column, message)
    hint = "within \"...\" a backslash is written \\\\; or use '...'"
    # libyaml points at the backslash, PyYAML after it.
    column = at.column if at.after.startswith("\\") else at.column - 1
    return Explained(at.line, column, "unknown escape after '\\'", hint)


def _first_character(problem: str, begun: _Place, at: _Place) -> Explained | None:
    start = at if "cannot start" in problem else begun
    character = start.after[:1]
    if not character or character not in _NOT_A_START:
        return None
    message = f"a value cannot start with {character!r} unquoted"
    return Explained(start.line, start.column, message, "quote it")


def _colon(problem: str, at: _Place) -> Explained | None:
    if "mapping values are not allowed" in problem:
        if ":" in at.before or "- " in at.before:
            message = "a second ': ' in a value"
            return Explained(at.line, at.column, message, 'quote the value: "..."')
        indent = len(at.before) - len(at.before.lstrip()) + 1
        message = "this key is indented deeper than the one before it"
        hint = "a key that has a value cannot have keys below it"
        return Explained(at.line, indent, message, hint)
    if "could not find expected ':'" in problem:
        # The mark is after the word that the author meant as a key.
        message = "there is a key without ':' before this line"
        return Explained(at.line, at.column, message, "write KEY: VALUE")
    if "entries are not allowed" in problem:
        message = "a list cannot begin on the line of its key"
        hint = "put each '- item' on its own line, or write [item, ...]"
        return Explained(at.line, at.column, message, hint)
    return None


def _brackets(context: str, begun: _Place, at: _Place) -> Explained | None:
    for kind, opening, closing in (("sequence", "[", "]"), ("mapping", "{", "}")):
        if f"flow {kind}" not in context:
            continue
        if hosts := _hostlist(at):
            return hosts
        if at.after.strip():
            message = (
                f"expected ',' or '{closing}' in the {kind} begun at {begun.where}"
            )
            return Explained(at.line, at.column, message)
        message = f"'{opening}' is not closed by '{closing}'"
        return Explained(begun.line, begun.column, message)
    if "flow" in context and not at.after:
        message = "a '[' or '{' is not closed"
        return Explained(at.line, at.column, message)
    if at.after[:1] in ("]", "}") and at.after:
        message = f"{at.after[0]!r} has no opening bracket"
        return Explained(at.line, at.column, message)
    return None


def _hostlist(at: _Place) -> Explained | None:
    """``node[1-4]`` in a flow list or mapping, where brackets must be quoted."""
    skipped = max(0, len(at.before) - MAX_NAME_LENGTH)
    begun = _HOSTLIST_BEGIN.search(at.before[skipped:])
    rest = _HOSTLIST_REST.match(at.after)
    if begun is None or rest is None:
        return None
    word = begun[0] + rest[0]
    message = f"{word} has brackets, so it must be quoted here"
    column = skipped + begun.start() + 1
    return Explained(at.line, column, message, f'write "{word}"')


def _indentation(
    context: str, problem: str, begun: _Place, at: _Place
) -> Explained | None:
    if "block" not in context:
        return None
    kind = "list" if "collection" in context else "mapping"
    if at.before.strip():
        quote = at.before.rstrip()[-1:]
        hint = None
        if quote in ("'", '"'):
            hint = f"a {quote} within {quote}...{quote} ends the text"
        return Explained(at.line, at.column, "text after the end of a value", hint)
    what = "'-'" if at.after.startswith("-") else "this line"
    if at.column == begun.column:
        wanted = "a key of the mapping" if kind == "mapping" else "'-' of the list"
        found = ", found '-'" if at.after.startswith("-") else ""
        message = f"expected {wanted} begun at {begun.where}{found}"
        return Explained(at.line, at.column, message, "check the indentation")
    depth = "less than" if at.column < begun.column else "differently from"
    message = f"{what} is indented {depth} the {kind} begun at {begun.where}"
    return Explained(at.line, at.column, message, "check the indentation")
