"""Ensures that output of tasks, agents and hosts cannot control a terminal.

Characters that are invisible, or that would move, colour or reorder text, become
visible ASCII (``\\x1b``). Log files keep the raw bytes. Pure.
"""

from __future__ import annotations

import re

# Colours and other renditions are just removed. If a removal joins the parts of another
# sequence, that sequence is escaped below like any other.
_COLOURS = re.compile("(?:\x1b\\[|\x9b)[0-9;:]*m")

_HOSTILE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and line feed, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # reorder text (bidi)
    "\u200b\u2028\u2029\u2060-\u2064\ufeff\ufff9-\ufffb"  # invisible, or new lines
    "\ud800-\udfff"  # bytes that were not UTF-8, and lone surrogates
    "\U000e0000-\U000e007f"  # invisible tags
    "]"
)


_BLANK = "\b \t\n\v\f"


def sanitise(text: str) -> str:
    """Text of any number of lines, made safe for a terminal."""
    if text.isprintable():
        return text
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _HOSTILE.sub(_visible, without_colours(text))


def without_colours(text: str) -> str:
    """The text without sequences that set colours and other renditions."""
    return _COLOURS.sub("", text) if "\x1b" in text or "\x9b" in text else text


def sanitise_word(text: str) -> str:
    """Like ``sanitise``, for names, causes and table cells: returns a single line."""
    if text.isprintable():
        return text
    text = text.replace("\r\n", "\n").strip("\r\n")
    return sanitise(text.replace("\t", " ").replace("\r", "\\r").replace("\n", "\\n"))


def settle(line: str) -> str:
    """What a terminal finally shows of a line that overwrites itself.

    Progress bars are such lines, and only their last state counts. They go back with a
    carriage return, or with as many backspaces as characters that they have written.
    """
    if "\r" in line:
        states = [state for state in line.split("\r") if state.strip(_BLANK)]
        line = states[-1] if states else ""
    return _overwritten(line) if "\b" in line else line


def _overwritten(line: str) -> str:
    shown: list[str] = []
    at = 0
    for character in line:
        if character == "\b":
            at = max(0, at - 1)
            continue
        shown[at : at + 1] = character
        at += 1
    return "".join(shown)


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"  # a byte that surrogateescape preserved
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
