"""Parses ssh_config(5) into directives, and evaluates them for a host.

Pure: the function that reads files is an argument.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

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
_RAW = "proxycommand"
"""The keyword whose value is the unparsed rest of the line, which goes to a shell."""


class _Criterion(NamedTuple):
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
    """The directives of a file and the files that it includes. Raises HostError."""
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
        if key == _RAW:
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
        patterns = ""
        if kind not in ("all", "final", "canonical"):
            patterns = next(remaining, "")
            if not patterns:
                raise HostError(f"{where}: Match {kind} needs a value")
        if kind in ("host", "originalhost"):
            patterns = patterns.lower()
        criteria.append(_Criterion(kind, tuple(patterns.split(",")), negated, where))
    return tuple(criteria)


def lookup(directives: Sequence[Directive], host: str, *, me: str) -> Options:
    """For each keyword, the first value that applies. Raises HostError."""
    options: dict[str, tuple[str, ...]] = {}
    final = any(
        c.kind == "final" for d in directives for match in d.when for c in match
    )
    for is_final in (False, True) if final else (False,):
        holds: dict[int, bool] = {}
        for directive in directives:
            for match in directive.when:
                # A Match is evaluated once, with the options known at its line.
                if id(match) not in holds:
                    holds[id(match)] = all(
                        _holds(c, options, host, me=me, final=is_final) for c in match
                    )
            if not all(holds[id(match)] for match in directive.when):
                continue
            if directive.key in _LISTS:
                values = options.get(directive.key, ()) + directive.values
                options[directive.key] = tuple(dict.fromkeys(values))
            else:
                options.setdefault(directive.key, directive.values)
    return options


def _holds(
    criterion: _Criterion, options: Options, host: str, *, me: str, final: bool
) -> bool:
    flags = {"all": True, "final": final, "canonical": False}
    hostname = options.get("hostname", ("%h",))[0].replace("%h", host)
    subjects = {
        "name": host,  # a Host line; only these are case-sensitive
        "originalhost": host.lower(),
        "host": hostname.lower(),
        "user": options.get("user", (me,))[0],
        "localuser": me,
    }
    if criterion.kind in flags:
        holds = flags[criterion.kind]
    elif criterion.kind in subjects:
        holds = matches(criterion.patterns, subjects[criterion.kind])
    else:
        raise HostError(
            f"{criterion.where}: tfcluster does not know 'Match {criterion.kind}'",
            hint="set 'config_file' under 'ssh' to another file",
        )
    return holds is not criterion.negated


def matches(patterns: Iterable[str], text: str) -> bool:
    """Whether a pattern with ``*`` and ``?`` matches and none with ``!`` does."""
    matching = False
    for pattern in patterns:
        plain = pattern.removeprefix("!")
        same = plain == text
        if "*" in plain or "?" in plain:
            # [ is not special in these patterns.
            same = fnmatchcase(text, plain.replace("[", "[[]"))
        if same and pattern.startswith("!"):
            return False
        matching |= same
    return matching
