"""Tests that no hostile text can control the terminal."""

from __future__ import annotations

import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.time_limits import allow_s
from tfcluster.console.sanitise import sanitise, sanitise_word, settle

HOSTILE = [
    "\x1b]0;new title\x07",
    "\x1b]0;new title\x1b\\",
    "\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\",
    "\x1b]52;c;ZXZpbA==\x07",  # writes to the clipboard
    "\x1b]50;?\x07",
    "\x1b[2J\x1b[H",
    "\x1b[8mhidden",  # looks like a colour, but is removed
    "\x1b[3\x1b[0m1m",  # removing the inner sequence leaves an outer one
    "\x1b\x1b[0m[31m",
    "\x1b[6n",
    "\x1b[21t",
    "\x1b[?1049h",
    "\x1b[1;1H",
    "\x1bPq#0;2;0;0;0\x1b\\",
    "\x1b_Gi=1\x1b\\",
    "\x1b^privacy\x1b\\",
    "\x1bc",
    "\x1b(0",
    "\x1b#8",
    "\x1b",
    "\x1b[",
    "\x9b31m\x9b2J",
    "\x9d0;title\x9c",
    "\x90q\x9c",
    "\x85next line",
    "\x0e\x0f",
    "\x08\x08\x08overwritten",
    "\x0b\x0c",
    "\x07",
    "\x00",
    "\x7f",
    "\x05",  # makes the terminal answer
    "user\u202etxt.exe",
    "\u2066isolated\u2069\u200f\u200e\u061c",
    "\u2028\u2029",
    "zero\u200bwidth\ufeff",
    "\U000e0041",
    "\udcff\udc80",
    "\ud800",
    "a\rb",
]

_FORBIDDEN = {"Cc", "Cs", "Zl", "Zp"}
_BIDI = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def _is_safe(text: str, *, breaks: str = "\n\t") -> bool:
    return all(
        c in breaks
        or (
            unicodedata.category(c) not in _FORBIDDEN
            and unicodedata.bidirectional(c) not in _BIDI
        )
        for c in text
    )


@pytest.mark.parametrize("text", HOSTILE)
def test_the_corpus(text: str) -> None:
    for shown in (sanitise(text), sanitise(f"before {text} after\n")):
        assert _is_safe(shown), shown
        shown.encode()
    assert _is_safe(sanitise_word(text), breaks="")


@given(st.text(st.characters(codec=None)))
def test_no_text_at_all_gets_through(text: str) -> None:
    assert _is_safe(sanitise(text))
    assert _is_safe(sanitise_word(text), breaks="")
    assert sanitise(sanitise(text)) == sanitise(text)


@given(st.binary())
def test_bytes_that_were_not_text_are_shown_as_such(data: bytes) -> None:
    sanitise(data.decode("utf-8", errors="surrogateescape")).encode()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("ä€ 漢字 \U0001f600 👩\u200d🚀", "ä€ 漢字 \U0001f600 👩\u200d🚀"),
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[1;31mred\x1b[0m \x1b[38:5:1mx\x1b[m", "red x"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\x00\x7f\x9b", "\\x00\\x7f\\x9b"),
        ("\udcff", "\\xff"),
        ("\ud800", "\\ud800"),
        ("\u202e", "\\u202e"),
        ("\U000e0041", "\\U000e0041"),
        ("a\r\nb\rc", "a\nb\nc"),
    ],
)
def test_what_people_see(text: str, shown: str) -> None:
    assert sanitise(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("node1", "node1"),
        ("two\nlines\r\n", "two\\nlines"),
        ("a\tb", "a b"),
        ("x\ry", "x\\ry"),
        ("\x1b[31mred\x1b[0m", "red"),
    ],
)
def test_a_word_stays_on_its_line(text: str, shown: str) -> None:
    assert sanitise_word(text) == shown


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain", "plain"),
        ("10%\r50%\r100%", "100%"),
        ("10%\r50%\r", "50%"),
        ("done\r   ", "done"),
        ("\r", ""),
        ("", ""),
    ],
)
def test_a_progress_bar_settles_on_its_last_state(line: str, shown: str) -> None:
    assert settle(line) == shown


def test_plain_text_costs_nearly_nothing() -> None:
    lines = ["Epoch 3/10: loss 0.1234, accuracy 0.98 " * 3] * 100_000
    began_s = time.process_time()
    for line in lines:
        sanitise(line)
    assert time.process_time() - began_s < allow_s(1)


def test_a_bar_of_keras_shows_its_last_state() -> None:
    first = "1/8 ━━━━ 1s 200ms/step - loss: 0.65"
    last = "8/8 ━━━━ 0s 3ms/step - loss: 0.41 "
    line = f"{first}{chr(8) * len(first)}\r{last}"
    assert settle(line) == last
    assert settle(f"{first}{chr(8) * len(first)}") == first


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("10%\b\b\b20%", "20%"),
        ("|\b/\b-", "-"),
        ("abc\b\b\b\b\bX", "Xbc"),
        ("\b\b", ""),
        ("a\r\b\b", "a"),
    ],
)
def test_backspaces_overwrite(line: str, shown: str) -> None:
    assert settle(line) == shown
