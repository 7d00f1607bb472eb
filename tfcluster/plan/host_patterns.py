"""Host names as clusters write them: ``node[01-04,7]`` to names and back.

The syntax is that of Slurm and ClusterShell. Order is kept; nothing is sorted. Names
are not resolved, so the hosts need not exist.
"""

from __future__ import annotations

import ipaddress
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

MAX_NAME_LENGTH = 253
"""RFC 1035: the longest name that DNS can carry."""
_SHOWN_LENGTH = 60
"""How much of an invalid text an error shows."""

_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_SCOPE = re.compile(r"[A-Za-z0-9._-]{1,32}")
_MAX_DIGITS = 18
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_DIGITS = re.compile(r"([0-9]+)")


class HostlistError(ValueError):
    """A hostlist that cannot be parsed; ``column`` counts from 1."""

    def __init__(self, message: str, column: int) -> None:
        super().__init__(message)
        self.message = message
        self.column = column


def expand(text: str, *, limit: int = 10_000) -> list[str]:
    """The names that ``text`` stands for, in its order.

    ``node[01-04,7]-ib,login`` has ranges (padded as their first number is), single
    numbers, several brackets in a name (the last one varies fastest), and commas
    between names; ``[::1]`` is an IPv6 literal. One comma at the end is tolerated.
    Raises HostlistError for anything else, and for more than ``limit`` names, before
    making any name.
    """
    patterns = [_parse(item, column) for item, column in split(text)]
    count = sum(math.prod(part.size for part in pattern) for pattern in patterns)
    if count > limit:
        raise HostlistError(f"expands to {count} hosts (limit {limit})", 1)
    return [
        "".join(name)
        for pattern in patterns
        for name in itertools.product(*(part.texts for part in pattern))
    ]


def split(text: str) -> list[tuple[str, int]]:
    """The items between top-level commas, with columns from 1. Raises HostlistError."""
    items: list[tuple[str, int]] = []
    start = 0
    for end in _commas(text):
        item = text[start:end].strip(" ")
        if item:
            column = start + text[start:end].index(item) + 1
            items.append((item, column))
        elif end < len(text) or not items:
            message = "an empty item" if text.strip(" ") else "no host is given"
            raise HostlistError(message, start + 1)
        start = end + 1
    return items


def _commas(text: str) -> Iterator[int]:
    """The index of each top-level item's end; the last one ends with the text."""
    opened: int | None = None
    for index, character in enumerate(text):
        if character == "[":
            if opened is not None:
                raise HostlistError("brackets inside brackets", index + 1)
            opened = index
        elif character == "]":
            if opened is None:
                raise HostlistError("']' without '['", index + 1)
            opened = None
        elif character == "," and opened is None:
            yield index
    if opened is not None:
        inside = text[opened + 1 :]
        if ":" in inside:
            raise HostlistError('write IPv6 as "[::1]", quoted', opened + 1)
        raise HostlistError("']' is missing", opened + 1)
    yield len(text)


class _Part(NamedTuple):
    """A part of a name that is plain text, or a bracket with ranges of numbers."""

    size: int
    length: int
    """The number of characters of the longest text."""
    texts: Iterable[str]
    """Everything that it stands for; made only on use."""


def _parse(item: str, column: int) -> list[_Part]:
    if literal := _ipv6_literal(item, column):
        return [_Part(1, len(literal), [literal])]
    parts: list[_Part] = []
    position = 0
    while position < len(item):
        opened = item.find("[", position)
        if opened != position:
            text = item[position : opened if opened > 0 else None]
            parts.append(_Part(1, len(text), [text]))
        if opened < 0:
            break
        closed = item.index("]", opened)
        parts.append(_bracket(item[opened + 1 : closed], column + opened + 1))
        position = closed + 1
    # Checked before expanding: excessively long names would exhaust the memory.
    if sum(part.length for part in parts) > MAX_NAME_LENGTH:
        raise HostlistError(f"longer than {MAX_NAME_LENGTH} characters", column)
    return parts


def _ipv6_literal(item: str, column: int) -> str | None:
    """The address in ``[::1]``; None if the item has no colon. Raises HostlistError."""
    if ":" not in item:
        return None
    if item.startswith("[") and item.endswith("]") and _is_ipv6(item[1:-1]):
        return item[1:-1]
    if item.count(":") == 1 and "[" not in item.partition(":")[2]:
        raise HostlistError(f"{item[:_SHOWN_LENGTH]!r} is not a host name: ':'", column)
    raise HostlistError('write IPv6 as "[::1]", quoted', column)


def _bracket(text: str, column: int) -> _Part:
    size = length = 0
    texts: list[Iterator[str]] = []
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece)
        if not match:
            shown = piece[:_SHOWN_LENGTH]
            what = f"{shown!r} is not a number or a range" if piece else "an empty item"
            raise HostlistError(what, column)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise HostlistError(f"range {piece} is reversed", column)
        numbers, width = range(int(first), int(last) + 1), len(first)
        size += len(numbers)
        length = max(length, width, len(str(int(last))))
        texts.append(map(partial(_padded, width), numbers))
        column += len(piece) + 1
    return _Part(size, length, itertools.chain.from_iterable(texts))


def _padded(width: int, number: int) -> str:
    return str(number).zfill(width)


def fold(names: Sequence[str]) -> str:
    """A short text for ``names`` in order: ``expand(fold(names)) == names``."""
    items: list[str] = []
    start = 0
    while start < len(names):
        around = _around_number(*names[start : start + 2])
        if around is None:
            name = names[start]
            items.append(f"[{name}]" if ":" in name else name)
            start += 1
            continue
        before, after = map(re.escape, around)
        pattern = re.compile(f"{before}([0-9]{{1,{_MAX_DIGITS}}}){after}")
        numbers: list[str] = []
        while start < len(names) and (match := pattern.fullmatch(names[start])):
            numbers.append(match[1])
            start += 1
        items.append(f"[{','.join(_folded(numbers))}]".join(around))
    return ",".join(items)


def _around_number(name: str, other: str = "") -> tuple[str, str] | None:
    """What is before and after the only number in which two names differ."""
    ours, theirs = _DIGITS.split(name), _DIGITS.split(other)
    if ":" in name or len(ours) != len(theirs):
        return None
    # Text and digits alternate; digits are at odd positions.
    different = [at for at, text in enumerate(ours) if text != theirs[at]]
    if len(different) != 1 or different[0] % 2 == 0:
        return None
    (at,) = different
    if max(len(ours[at]), len(theirs[at])) > _MAX_DIGITS:
        return None
    return "".join(ours[:at]), "".join(ours[at + 1 :])


def _folded(numbers: Sequence[str]) -> Iterator[str]:
    first = last = numbers[0]
    for number in numbers[1:]:
        if number == _padded(len(first), int(last) + 1):
            last = number
            continue
        yield first if first == last else f"{first}-{last}"
        first = last = number
    yield first if first == last else f"{first}-{last}"


def host_name_problem(text: str) -> str | None:
    """Why ``text`` is neither a host name nor a bare IP address, or None if it is.

    A whitelist, because names end up in argument lists: one that begins with ``-``
    would be an option of ssh, and ssh options can run programs.
    """
    if not text:
        return "is empty"
    if len(text) > MAX_NAME_LENGTH:
        return f"is longer than {MAX_NAME_LENGTH} characters"
    if ":" in text:
        return None if _is_ipv6(text) else "is not an IPv6 address"
    if text.startswith("-"):
        return "is not a host name: it begins with '-'"
    labels = text.removesuffix(".").split(".")
    if not all(map(_LABEL.fullmatch, labels)):
        return "is not a host name"
    if all(label.isdecimal() for label in labels) and not _is_ip(text, 4):
        return "is not an IPv4 address"
    return None


def _is_ipv6(text: str) -> bool:
    address, percent, scope = text.partition("%")
    return _is_ip(address, 6) and (not percent or bool(_SCOPE.fullmatch(scope)))


def _is_ip(text: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(text).version == version
    except ValueError:
        return False
