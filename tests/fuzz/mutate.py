"""Makes new inputs from known ones: bits, bytes, splices, lengths, numbers, JSON. Pure.

All chance comes from the given ``Random``, so that a seed repeats a campaign.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

INTERESTING = (
    *(b"\0", b"\n", b"\r\n", b"\r", b"\t", b" ", b",", b":", b"=", b"-", b"|", b"\xff"),
    *(b"\xc3\xa9", b"\xe2\x80\xa8", b"\xed\xa0\x80", b"\\ud800", b"\xef\xbb\xbf"),
    *(b"\xd9\xa3", b"\xc2\xb2", b"\xe2\x80\xae", b"\xc2\x85", b"\x1b[2J"),
    *(
        b"0",
        b"-1",
        b"1",
        b"00",
        b"255",
        b"65536",
        b"4294967295",
        b"9223372036854775808",
    ),
    *(b"9" * 25, b"9" * 400, b"9" * 5000, b"1e999", b"-1e999", b"0.1", b"NaN", b"nan"),
    *(b"Infinity", b"-Infinity", b"inf", b"null", b"true", b'""', b"[]", b"{}", b"%"),
    *(
        b"[" * 2000,
        b'{"a":' * 2000,
        b"<a>" * 500,
        b"((((",
        b"*",
        b"?",
        b"!",
        b"~",
        b"$",
    ),
)
"""What parsers stumble over: limits, separators, endings, depth, odd characters."""

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**19, 10**400),
    *(0.0, -0.0, 0.5, -1.5, 1e300, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        "x",
        "\0",
        "\ud800",
        "0",
        "-1",
        "nan",
        "9" * 5000,
        "x" * 300,
        "a\nb",
        "\u2028",
    ),
    *([], [[]], {}, {"": None}, [1], ["a"], [None], [[1, 2], 3], {"a": {"b": []}}),
)
_LENGTHS = (0, 1, 2, 63, 64, 255, 2**16, 2**26, 2**31 - 1, 2**31, 2**32 - 1)
_LONG_LENGTHS = (*_LENGTHS, 2**40, 2**48, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_NUMBER = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?")
_MANY_CHANCE = 0.03


def mutated(
    random: Random,
    data: bytes,
    *,
    others: Sequence[bytes] = (),
    words: Sequence[bytes] = (),
    most_bytes: int = 1 << 16,
) -> bytes:
    """A new input of at most ``most_bytes`` bytes, made from ``data``.

    ``others`` are inputs of which parts are taken, ``words`` are parts that mean
    something to the parser.
    """
    parts = (*words, *words, *INTERESTING) if words else INTERESTING
    for _ in range(1 + min(5, int(random.expovariate(0.7)))):
        if random.random() < _MANY_CHANCE:
            data = _many(random, data, parts, most_bytes)
        else:
            data = random.choice(_KINDS)(random, data, parts, others)
    return data[:most_bytes]


def _flip_bit(
    random: Random, data: bytes, parts: Sequence[bytes], others: Sequence[bytes]
) -> bytes:
    if not data:
        return random.choice(parts)
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


def _set_bytes(
    random: Random, data: bytes, parts: Sequence[bytes], others: Sequence[bytes]
) -> bytes:
    at = random.randint(0, len(data))
    count = random.randint(1, 4)
    return data[:at] + random.randbytes(count) + data[at + count :]


def _cut(
    random: Random, data: bytes, parts: Sequence[bytes], others: Sequence[bytes]
) -> bytes:
    start, end = _span(random, data)
    return data[:start] + data[end:]


def _truncate(
    random: Random, data: bytes, parts: Sequence[bytes], others: Sequence[bytes]
) -> bytes:
    return data[: random.randint(0, len(data))]


def _repeat(
    random: Random, data: bytes, parts: Sequence[bytes], others: Sequence[bytes]
) -> bytes:
    start, end = _span(random, data)
    return data[:end] + data[start:end] * random.randint(1, 4) + data[end:]


def _insert(
    random: Random, data: bytes, parts: Sequence[bytes], others: Sequence[bytes]
) -> bytes:
    at = random.randint(0, len(data))
    return data[:at] + random.choice(parts) + data[at:]


def _overwrite(
    random: Random, data: bytes, parts: Sequence[bytes], others: Sequence[bytes]
) -> bytes:
    start, end = _span(random, data)
    return data[:start] + random.choice(parts) + data[end:]


def _splice(
    random: Random, data: bytes, parts: Sequence[bytes], others: Sequence[bytes]
) -> bytes:
    other = random.choice(others) if others else data
    start, end = _span(random, other)
    first, last = _span(random, data)
    return data[:first] + other[start:end] + data[last:]


def _swap_lines(
    random: Random, data: bytes, parts: Sequence[bytes], others: Sequence[bytes]
) -> bytes:
    lines = data.split(b"\n")
    one, other = random.randrange(len(lines)), random.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"\n".join(lines)


def _edit_length(
    random: Random, data: bytes, parts: Sequence[bytes], others: Sequence[bytes]
) -> bytes:
    """Overwrite four or eight bytes by a number, as a length field has it."""
    width = random.choice((4, 8))
    if len(data) < width:
        return data
    # Length fields are mostly at the beginning.
    last = len(data) - width
    at = random.randint(0, min(last, 16) if random.random() < 0.7 else last)
    number = random.choice(_LENGTHS if width == 4 else _LONG_LENGTHS)
    field = number.to_bytes(width, random.choice(("big", "little")))
    return data[:at] + field + data[at + width :]


def _edit_number(
    random: Random, data: bytes, parts: Sequence[bytes], others: Sequence[bytes]
) -> bytes:
    """Replace a number in the text by another one."""
    found = list(_NUMBER.finditer(data[: 1 << 14]))
    if not found:
        return data
    match = random.choice(found)
    known = int(match[0]) if len(match[0]) < 20 and b"." not in match[0] else 0
    near = (known + 1, known - 1, known * 2, -known, known * 10**9, 2**63, 10**400)
    number = str(random.choice(near)).encode()
    if random.random() < 0.3:
        number = random.choice((b"1e999", b"NaN", b"9" * 5000, b"0.5", b"'", b"[[]]"))
    return data[: match.start()] + number + data[match.end() :]


def _edit_json(
    random: Random, data: bytes, parts: Sequence[bytes], others: Sequence[bytes]
) -> bytes:
    """Replace, remove or add a value in one of the lines that are JSON."""
    lines = data.split(b"\n")
    at = random.randrange(len(lines))
    try:
        value = json.loads(lines[at])
        lines[at] = json.dumps(_edited(random, value), separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return data
    return b"\n".join(lines)


def _edited(random: Random, value: Any) -> Any:
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(list(value))
        if random.random() < 0.1:
            return {other: value[other] for other in value if other != key}
        if random.random() < 0.05:
            return {**value, random.choice(("type", "", "\0", key * 2)): value[key]}
        return {**value, key: _edited(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.8:
        at = random.randrange(len(value))
        if random.random() < 0.2:
            return [*value[:at], *value[at + 1 :]]
        if random.random() < 0.2:
            return [*value[: at + 1], *value[at:]]
        return [*value[:at], _edited(random, value[at]), *value[at + 1 :]]
    return random.choice(ODD_VALUES)


def _many(
    random: Random, data: bytes, parts: Sequence[bytes], most_bytes: int
) -> bytes:
    """Repeat a part until the input is long: does the time grow faster than that?"""
    start, end = _span(random, data)
    part = data[start:end] if random.random() < 0.6 else random.choice(parts)
    if not part:
        return data
    room = random.choice((most_bytes, most_bytes // 8)) - len(data)
    return data[:start] + part * max(1, room // len(part)) + data[end:]


def _span(random: Random, data: bytes) -> tuple[int, int]:
    """Where a part of the data begins and ends; mostly a short one, or one line."""
    start = random.randint(0, len(data))
    if random.random() < 0.3:
        start = data.rfind(b"\n", 0, start) + 1
        return start, data.find(b"\n", start) + 1 or len(data)
    return start, min(len(data), start + int(random.expovariate(1 / 12)))


_Kind = Callable[[Random, bytes, Sequence[bytes], Sequence[bytes]], bytes]
_KINDS: tuple[_Kind, ...] = (
    *(_flip_bit, _set_bytes, _cut, _truncate, _repeat, _insert, _insert, _overwrite),
    *(_splice, _swap_lines, _edit_length, _edit_number, _edit_json, _edit_json),
)
