"""Host names as clusters write them: ``node[01-04,7]`` to names and back.

The syntax is that of Slurm and ClusterShell. Order is kept; nothing is sorted. Names
are not resolved, so the hosts need not exist.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections.abc import Iterator, Sequence

from tfcluster.base.light_dataclasses import dataclass

MAX_NAME_LENGTH = 253
"""RFC 1035: the longest name that DNS can carry."""
_SHOWN_LENGTH = 60
"""How much of an invalid text an error shows."""

_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_SCOPE = re.compile(r"[A-Za-z0-9._-]{1,32}")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_DIGITS = re.compile(r"([0-9]+)")


class HostlistError(ValueError):
    """A hostlist that cannot be parsed; ``column`` counts from 1."""

    def __init__(self, message: str, column: int) -> None:
        super().__init__(message)
        self.message = message
        self.column = column


def expand(text: str, *, limit: int = 10_000, slurm_order: bool = False) -> list[str]:
    """The names that ``text`` stands for, in its order.

    ``node[01-04,7]-ib,login`` has ranges (padded as their first number is), single
    numbers, several brackets in a name, and commas between names; ``[::1]`` is an IPv6
    literal. One comma at the end is tolerated. Raises HostlistError for anything else,
    and for more than ``limit`` names, before making any name.

    If a name has several brackets, the last one varies fastest and the first one
    slowest. ``slurm_order`` gives the order of ``scontrol show hostnames`` instead,
    which differs for three or more brackets.
    """
    patterns = [_parse(item, column) for item, column in split(text)]
    count = sum(pattern.count for pattern in patterns)
    if count > limit:
        raise HostlistError(f"expands to {count} hosts (limit {limit})", 1)
    if slurm_order:
        return [name for pattern in patterns for name in pattern.slurm_names()]
    return [name for pattern in patterns for name in pattern.names()]


def split(text: str) -> list[tuple[str, int]]:
    """The items between top-level commas, stripped, each with its column (from 1).

    Raises HostlistError for brackets that do not match and for empty items.
    """
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


@dataclass(frozen=True, slots=True)
class _Range:
    """Numbers ``low`` to ``high``, each at least ``width`` digits wide."""

    low: int
    high: int
    width: int

    def __len__(self) -> int:
        return self.high - self.low + 1

    def texts(self) -> Iterator[str]:
        return (str(n).zfill(self.width) for n in range(self.low, self.high + 1))


@dataclass(frozen=True, slots=True)
class _Pattern:
    """One item: plain text and bracketed number ranges, in order."""

    parts: tuple[str | tuple[_Range, ...], ...]

    @property
    def count(self) -> int:
        count = 1
        for part in self.parts:
            if not isinstance(part, str):
                # Not len(): it overflows for ranges of 10**18.
                count *= sum(each.high - each.low + 1 for each in part)
        return count

    @property
    def length(self) -> int:
        """The number of characters of the longest name."""
        return sum(
            len(part)
            if isinstance(part, str)
            else max(max(each.width, len(str(each.high))) for each in part)
            for part in self.parts
        )

    def names(self) -> Iterator[str]:
        return map("".join, itertools.product(*self._choices()))

    def slurm_names(self) -> Iterator[str]:
        """The names in Slurm's order: the last bracket varies fastest, then the first,
        then the second.

        Slurm's parser (_push_range_list in hostlist.c) expands the brackets before the
        last one from right to left, each around those to its left.
        """
        choices = self._choices()
        brackets = [
            at for at, part in enumerate(self.parts) if not isinstance(part, str)
        ]
        innermost = brackets[-1:]
        order = [at for at in reversed(range(len(choices))) if at not in innermost]
        order += innermost
        for chosen in itertools.product(*(choices[at] for at in order)):
            texts = dict(zip(order, chosen, strict=True))
            yield "".join(texts[at] for at in range(len(choices)))

    def _choices(self) -> list[Sequence[str]]:
        """The texts that each part can stand for."""
        return [
            (part,)
            if isinstance(part, str)
            else [text for each in part for text in each.texts()]
            for part in self.parts
        ]


def _parse(item: str, column: int) -> _Pattern:
    if literal := _ipv6_literal(item, column):
        return _Pattern((literal,))
    parts: list[str | tuple[_Range, ...]] = []
    position = 0
    while position < len(item):
        opened = item.find("[", position)
        if opened < 0:
            opened = len(item)
        if opened > position:
            parts.append(item[position:opened])
        if opened == len(item):
            break
        closed = item.index("]", opened)
        parts.append(_ranges(item[opened + 1 : closed], column + opened + 1))
        position = closed + 1
    pattern = _Pattern(tuple(parts))
    # Checked before expanding: excessively long names would exhaust the memory.
    if pattern.length > MAX_NAME_LENGTH:
        raise HostlistError(f"longer than {MAX_NAME_LENGTH} characters", column)
    return pattern


def _ipv6_literal(item: str, column: int) -> str | None:
    """The address in ``[::1]``; None if the item has no colon. Raises HostlistError."""
    if ":" not in item:
        return None
    if item.startswith("[") and item.endswith("]") and _is_ipv6(item[1:-1]):
        return item[1:-1]
    if item.count(":") == 1 and "[" not in item.partition(":")[2]:
        raise HostlistError(f"{item[:_SHOWN_LENGTH]!r} is not a host name: ':'", column)
    raise HostlistError('write IPv6 as "[::1]", quoted', column)


def _ranges(text: str, column: int) -> tuple[_Range, ...]:
    found: list[_Range] = []
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece)
        if not match:
            shown = piece[:_SHOWN_LENGTH]
            what = f"{shown!r} is not a number or a range" if piece else "an empty item"
            raise HostlistError(what, column)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise HostlistError(f"range {piece} is reversed", column)
        found.append(_Range(int(first), int(last), len(first)))
        column += len(piece) + 1
    return tuple(found)


def fold(names: Sequence[str]) -> str:
    """A short text for ``names``, for messages: ``expand(fold(names)) == names``.

    Adjacent names that differ in one number share a bracket; order and duplicates are
    kept.
    """
    items: list[str] = []
    run: _Run | None = None
    for name in names:
        if run is not None and run.take(name):
            continue
        if run is not None:
            items.append(str(run))
        run = _Run(name)
    if run is not None:
        items.append(str(run))
    return ",".join(items)


class _Run:
    """Consecutive names that differ only in one number, the same one for all."""

    def __init__(self, name: str) -> None:
        self._name = name
        # Text and digits alternate; digits are at odd positions.
        self._fields = _DIGITS.split(name)
        self._varying: int | None = None
        self._numbers: list[str] = []

    def take(self, name: str) -> bool:
        """Add ``name`` if it belongs to this run, and return whether it does."""
        fields = _DIGITS.split(name)
        if ":" in name or len(fields) != len(self._fields):
            return False
        different = [
            at
            for at, (ours, theirs) in enumerate(zip(self._fields, fields, strict=True))
            if ours != theirs
        ]
        if self._varying is None:
            if len(different) != 1 or not self._can_vary(different[0]):
                return False
            self._varying = different[0]
            self._numbers = [self._fields[self._varying]]
        elif different not in ([], [self._varying]):
            return False
        if len(fields[self._varying]) > 18:
            return False
        self._numbers.append(fields[self._varying])
        return True

    def _can_vary(self, at: int) -> bool:
        return at % 2 == 1 and len(self._fields[at]) <= 18

    def __str__(self) -> str:
        if ":" in self._name:
            return f"[{self._name}]"
        if self._varying is None:
            return self._name
        before = "".join(self._fields[: self._varying])
        after = "".join(self._fields[self._varying + 1 :])
        return f"{before}[{','.join(_folded(self._numbers))}]{after}"


def _folded(numbers: Sequence[str]) -> Iterator[str]:
    first = last = numbers[0]
    for number in numbers[1:]:
        if number == str(int(last) + 1).zfill(len(first)):
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
    if all(label.isdecimal() for label in labels) and not _is_ipv4(text):
        return "is not an IPv4 address"
    return None


def _is_ipv6(text: str) -> bool:
    address, percent, scope = text.partition("%")
    if percent and not _SCOPE.fullmatch(scope):
        return False
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return True


def _is_ipv4(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True
