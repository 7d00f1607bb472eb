"""Parses ssh_config(5) into directives, and evaluates them for a host.

Pure: the function that reads files is an argument. Does not know the meaning of
options, except those on which Match lines may depend.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tfcluster.base.errors import HostError

Options = Mapping[str, tuple[str, ...]]
"""Lower-case keyword -> values. Most keywords have one value: the joined arguments."""

ReadFiles = Callable[[str], Iterable[tuple[str, str]]]
"""Returns name and text of every file that matches the pattern of an Include."""

MAX_DEPTH = 16
"""How deep includes may be nested, as in OpenSSH (readconf.c)."""

_MAX_CHARACTERS = 1 << 14
"""Limit of a line; a longer one is not a configuration, and takes long to split."""
_LISTS = frozenset({"identityfile", "certificatefile"})
_RAW = frozenset({"proxycommand"})
"""Keywords whose value is the unparsed rest of the line, which goes to a shell."""


@dataclass(frozen=True, slots=True)
class _Criterion:
    """The patterns of a Host line, or one criterion of a Match line."""

    kind: str
    patterns: tuple[str, ...] = ()
    negated: bool = False
    where: str = ""


@dataclass(frozen=True, slots=True)
class Directive:
    """A keyword, its values, and the Host and Match lines that apply to it."""

    key: str
    values: tuple[str, ...]
    when: tuple[tuple[_Criterion, ...], ...]


def parse(name: str, text: str, read: ReadFiles) -> tuple[Directive, ...]:
    """The directives of a file and of all files that it includes.

    Raises HostError, with file and line, if the text is invalid.
    """
    return tuple(_parse(name, text, read, outer=(), depth=0))


def _parse(
    name: str,
    text: str,
    read: ReadFiles,
    *,
    outer: tuple[tuple[_Criterion, ...], ...],
    depth: int,
) -> Iterator[Directive]:
    if depth > MAX_DEPTH:
        raise HostError(f"{name}: files include each other more than {MAX_DEPTH} deep")
    when = outer
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{name}:{number}"
        if "\0" in line:
            raise HostError(f"{where}: has a NUL character")
        key, rest = _keyword(line.strip())
        if not key:
            continue
        if key in _RAW:
            yield Directive(key, (rest,), when)
            continue
        words = _words(rest, where)
        if key == "host":
            when = (*outer, (_Criterion("name", tuple(words)),))
        elif key == "match":
            when = (*outer, _match(words, where))
        elif key == "include":
            for pattern in words:
                for included, inner in read(pattern):
                    yield from _parse(
                        included, inner, read, outer=when, depth=depth + 1
                    )
        elif key in _LISTS:
            yield Directive(key, tuple(words[:1]), when)
        else:
            yield Directive(key, (" ".join(words),), when)


def _keyword(line: str) -> tuple[str, str]:
    """Split ``Key value``, ``Key=value`` or ``Key = value``; lower-cases the key."""
    if line.startswith("#"):
        return "", ""
    end = next((i for i, char in enumerate(line) if char in " \t="), len(line))
    rest = line[end:].lstrip(" \t")
    return line[:end].lower(), rest.removeprefix("=").lstrip(" \t")


def _words(text: str, where: str) -> list[str]:
    if len(text) > _MAX_CHARACTERS:
        raise HostError(f"{where}: longer than {_MAX_CHARACTERS} characters")
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise HostError(f"{where}: {str(error).lower()}") from error
    if not words:
        raise HostError(f"{where}: a value is missing")
    return words


def _match(words: Sequence[str], where: str) -> tuple[_Criterion, ...]:
    criteria = []
    remaining = iter(words)
    for word in remaining:
        negated, kind = word.startswith("!"), word.removeprefix("!").lower()
        patterns: tuple[str, ...] = ()
        if kind not in ("all", "final", "canonical"):
            value = next(remaining, None)
            if value is None:
                raise HostError(f"{where}: Match {kind} needs a value")
            patterns = tuple(value.split(","))
        criteria.append(_Criterion(kind, patterns, negated, where))
    return tuple(criteria)


def lookup(directives: Sequence[Directive], host: str, *, me: str) -> Options:
    """The options for ``host``: for each keyword, the first value that applies.

    ``me`` is the local user. Raises HostError for an unknown criterion of Match.
    """
    found = _pass(directives, {}, host, me=me, final=False)
    if any(c.kind == "final" for d in directives for one in d.when for c in one):
        found = _pass(directives, found, host, me=me, final=True)
    return found


def _pass(
    directives: Sequence[Directive],
    known: Options,
    host: str,
    *,
    me: str,
    final: bool,
) -> dict[str, tuple[str, ...]]:
    found = dict(known)
    holds: dict[int, bool] = {}
    for directive in directives:
        for criteria in directive.when:
            # A Match is evaluated once, with the options known at its line.
            if id(criteria) not in holds:
                holds[id(criteria)] = all(
                    _holds(c, found, host, me=me, final=final) for c in criteria
                )
        if not all(holds[id(criteria)] for criteria in directive.when):
            continue
        if directive.key in _LISTS:
            old = found.get(directive.key, ())
            new = tuple(value for value in directive.values if value not in old)
            found[directive.key] = old + new
        else:
            found.setdefault(directive.key, directive.values)
    return found


def _holds(
    criterion: _Criterion, found: Options, host: str, *, me: str, final: bool
) -> bool:
    match criterion.kind:
        case "all":
            holds = True
        case "final":
            holds = final
        case "canonical":
            holds = False
        case "name":  # a Host line; only these are case-sensitive
            holds = matches(criterion.patterns, host)
        case "originalhost":
            holds = matches_host(criterion.patterns, host)
        case "host":
            hostname = found.get("hostname", ("%h",))[0].replace("%h", host)
            holds = matches_host(criterion.patterns, hostname)
        case "user":
            holds = matches(criterion.patterns, found.get("user", (me,))[0])
        case "localuser":
            holds = matches(criterion.patterns, me)
        case other:
            raise HostError(
                f"{criterion.where}: tfcluster does not know 'Match {other}'",
                hint="set 'config_file' under 'ssh' to another file",
            )
    return holds is not criterion.negated


def matches(patterns: Iterable[str], text: str) -> bool:
    """Whether a pattern with ``*`` and ``?`` matches and none with ``!`` does."""
    found = False
    for pattern in patterns:
        negated = pattern.startswith("!")
        plain = pattern.removeprefix("!")
        if "*" in plain or "?" in plain:
            # [ is not special in these patterns.
            matching = fnmatchcase(text, plain.replace("[", "[[]"))
        else:
            matching = text == plain
        if matching:
            if negated:
                return False
            found = True
    return found


def matches_host(patterns: Iterable[str], host: str) -> bool:
    """Like ``matches``, for host names, ignoring case."""
    return matches([pattern.lower() for pattern in patterns], host.lower())
