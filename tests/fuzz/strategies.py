"""A strategy of hypothesis: valid inputs, changed where parsers stumble."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]

INTERESTING = (
    *(b"\0", b"\n", b"\r\n", b"\r", b"\t", b" ", b",", b":", b"=", b"-", b"|", b"\xff"),
    *(b"\xc3\xa9", b"\xe2\x80\xa8", b"\xed\xa0\x80", b"\\ud800", b"\xef\xbb\xbf"),
    *(b"\xd9\xa3", b"\xc2\xb2", b"\xe2\x80\xae", b"\xc2\x85", b"\x1b[2J"),
    *(b"0", b"-1", b"1", b"00", b"255", b"65536", b"4294967295"),
    *(b"9223372036854775808", b"9" * 25, b"9" * 400, b"9" * 5000, b"1e999", b"-1e999"),
    *(b"0.1", b"NaN", b"nan", b"Infinity", b"-Infinity", b"inf", b"null", b"true"),
    *(b'""', b"[]", b"{}", b"%", b"((((", b"*", b"?", b"!", b"~", b"$"),
    *(b"[" * 2000, b'{"a":' * 2000, b"<a>" * 500),
)
"""Limits, separators, endings, depth, odd characters."""

_SMALL_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.sampled_from((0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**19, 10**400))
    | st.sampled_from(("", "x", "\0", "\ud800", "-1", "9" * 5000, "a\nb", "\u2028")),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)
_LENGTHS = (0, 1, 2, 63, 64, 255, 2**16, 2**26, 2**31 - 1, 2**31, 2**32 - 1)
_LONG_LENGTHS = (*_LENGTHS, 2**40, 2**48, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_NUMBER = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?")


@st.composite
def mutated(
    draw: Draw, seeds: Sequence[bytes], words: Sequence[bytes], most_bytes: int
) -> bytes:
    """Inputs of at most ``most_bytes`` bytes, made from ``seeds``.

    ``words`` are parts that mean something to the parser.
    """
    data: bytes = draw(st.sampled_from(seeds) | st.binary(max_size=30))
    part = st.sampled_from(INTERESTING) | st.binary(max_size=4)
    if words:
        part = st.sampled_from(words) | part
    for change in draw(st.lists(st.sampled_from(_CHANGES), min_size=1, max_size=5)):
        data = change(draw, data, draw(part), seeds)[:most_bytes]
    return data


def _span(draw: Draw, data: bytes) -> tuple[int, int]:
    """Where a part of the data begins and ends: a short one, or one line."""
    start: int = draw(st.integers(0, len(data)))
    if draw(st.booleans()):
        return start, min(len(data), start + draw(st.integers(0, 40)))
    start = data.rfind(b"\n", 0, start) + 1
    return start, data.find(b"\n", start) + 1 or len(data)


def _replace(draw: Draw, data: bytes, part: bytes, seeds: Sequence[bytes]) -> bytes:
    start, end = _span(draw, data)
    return data[:start] + part + data[end:]


def _insert(draw: Draw, data: bytes, part: bytes, seeds: Sequence[bytes]) -> bytes:
    at: int = draw(st.integers(0, len(data)))
    return data[:at] + part + data[at:]


def _cut(draw: Draw, data: bytes, part: bytes, seeds: Sequence[bytes]) -> bytes:
    start, end = _span(draw, data)
    return data[:start] + data[end:] if draw(st.booleans()) else data[:start]


def _splice(draw: Draw, data: bytes, part: bytes, seeds: Sequence[bytes]) -> bytes:
    other = draw(st.sampled_from(seeds))
    start, end = _span(draw, other)
    return _replace(draw, data, other[start:end], seeds)


def _repeat(draw: Draw, data: bytes, part: bytes, seeds: Sequence[bytes]) -> bytes:
    """Up to a long input: does the time grow faster than its length?"""
    start, end = _span(draw, data)
    repeated: bytes = draw(st.sampled_from((part, data[start:end])))
    times: int = draw(st.integers(1, 20_000))
    return data[:end] + repeated * times + data[end:]


def _edit_length(draw: Draw, data: bytes, part: bytes, seeds: Sequence[bytes]) -> bytes:
    """Overwrite four or eight bytes by a number, as a length field has it."""
    width = draw(st.sampled_from((4, 8)))
    at = draw(st.integers(0, max(0, len(data) - width)))
    number = draw(st.sampled_from(_LENGTHS if width == 4 else _LONG_LENGTHS))
    field: bytes = number.to_bytes(width, draw(st.sampled_from(("big", "little"))))
    return data[:at] + field + data[at + width :]


def _edit_number(draw: Draw, data: bytes, part: bytes, seeds: Sequence[bytes]) -> bytes:
    """Replace a number in the text by another one."""
    matches = list(_NUMBER.finditer(data[: 1 << 14]))
    if not matches:
        return data
    match = draw(st.sampled_from(matches))
    known = int(match[0]) if len(match[0]) < 20 and b"." not in match[0] else 0
    near = (known + 1, known - 1, known * 2, -known, known * 10**9, 2**63, 10**400)
    number: bytes = draw(
        st.sampled_from([part, *(str(each).encode() for each in near)])
    )
    return data[: match.start()] + number + data[match.end() :]


def _edit_json(draw: Draw, data: bytes, part: bytes, seeds: Sequence[bytes]) -> bytes:
    """Replace or remove a value in one of the lines that are JSON."""
    lines = data.split(b"\n")
    at = draw(st.integers(0, len(lines) - 1))
    try:
        value = json.loads(lines[at])
        lines[at] = json.dumps(_edited(draw, value), separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return data
    return b"\n".join(lines)


def _edited(draw: Draw, value: Any) -> Any:
    deeper = draw(st.integers(0, 9))
    if isinstance(value, dict) and value and deeper:
        key = draw(st.sampled_from(list(value)))
        if deeper == 1:
            return {other: value[other] for other in value if other != key}
        return {**value, key: _edited(draw, value[key])}
    if isinstance(value, list) and value and deeper:
        at = draw(st.integers(0, len(value) - 1))
        if deeper < 3:
            return [*value[:at], *value[at + 1 :]]
        return [*value[:at], _edited(draw, value[at]), *value[at + 1 :]]
    return draw(_SMALL_JSON)


_CHANGES = (
    *(_replace, _insert, _cut, _splice, _repeat),
    *(_edit_length, _edit_number, _edit_json, _edit_json),
)
