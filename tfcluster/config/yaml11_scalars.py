"""Reads unquoted text as YAML 1.1 does, and detects where the author meant otherwise.

``NO`` is false, ``22:22`` is 1342 and ``010`` is 8. Values that people hardly ever mean
become ``Misread``, which no field accepts. Knows no places and no keys.
"""

from __future__ import annotations

import re

from tfcluster.base.light_dataclasses import dataclass

_EMPTY = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS = {
    spelled: meaning
    for meaning, words in ((True, "yes true on"), (False, "no false off"))
    for word in words.split()
    for spelled in (word, word.capitalize(), word.upper())
}
# YAML 1.1, https://yaml.org/type/int.html and float.html, as PyYAML reads them.
_DECIMAL = re.compile(r"0|-?[1-9][0-9]*")
_OTHER_INT = re.compile(
    r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*(?::[0-5]?[0-9])*)"
)
_FLOAT = re.compile(r"-?[0-9]+\.[0-9]+(?:[eE][-+][0-9]+)?")
_OTHER_FLOAT = re.compile(
    r"[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?"
    r"|[-+]?\.[0-9_]+(?:[eE][-+][0-9]+)?"
    r"|[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*"
)
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_MAX_DIGITS = 18
"""A longer number is a mistake, and very long ones are slow to convert."""


@dataclass(frozen=True, slots=True)
class Misread:
    """A value that YAML reads as something other than it looks like."""

    message: str
    hint: str


EMPTY = Misread("is empty", "give it a value, or omit the key")
_TOO_LONG = Misread(f"has more than {_MAX_DIGITS} digits", "write a smaller number")


class Lossy(float):
    """A float whose text differs from Python's text for it: ``2.10``."""


def read(raw: str) -> object:
    """A str, int, float, bool or Misread. Dates stay text."""
    if raw in _EMPTY:
        return EMPTY
    if raw in _BOOLEANS:
        return _BOOLEANS[raw]
    # Most values are text: everything below begins with one of these.
    if raw[0] not in "+-.0123456789":
        return raw
    if _DECIMAL.fullmatch(raw):
        return int(raw) if len(raw) <= _MAX_DIGITS else _TOO_LONG
    if _NOT_FINITE.fullmatch(raw):
        return Misread(f"{raw} is not finite", "write a number")
    if _OTHER_INT.fullmatch(raw):
        return _other_int(raw)
    if _FLOAT.fullmatch(raw) or _OTHER_FLOAT.fullmatch(raw):
        return _float(raw)
    return raw


def _other_int(raw: str) -> object:
    if len(raw) > _MAX_DIGITS:
        return _TOO_LONG
    sign, digits = (-1 if raw[0] == "-" else 1), raw.lstrip("+-").replace("_", "")
    if ":" in digits:
        number = 0
        for part in digits.split(":"):
            number = number * 60 + int(part)
        hint = f'quote it: "{raw}"'
        return Misread(f"YAML 1.1 reads {raw} as {sign * number}", hint)
    if digits.startswith("0") and digits.isdecimal() and len(digits) > 1:
        number = sign * int(digits, 8)
        hint = f"write {number} or {sign * int(digits)}, or quote it"
        return Misread(f"YAML reads {raw} as octal ({number})", hint)
    try:
        number = sign * int(digits or "0", 0)
    except ValueError:
        return raw
    hint = f'write {number}, or quote it: "{raw}"'
    return Misread(f"YAML reads {raw} as {number}", hint)


def _float(raw: str) -> object:
    if ":" in raw or "_" in raw or len(raw) > 40:
        return Misread(f"YAML 1.1 reads {raw[:40]} as a number", "quote it")
    number = float(raw)
    if number in (float("inf"), float("-inf")):
        return Misread(f"{raw} is not finite", "write a smaller number")
    return number if repr(number) == raw else Lossy(number)
