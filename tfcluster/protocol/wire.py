"""Frames on the channel between launcher and agent: one JSON object per line.

``docs/protocols.md`` lists the frames. This module knows only their outer form and
accepts arbitrary bytes: a frame is an object with a string ``type``, at most
``MAX_FRAME_BYTES`` long. The limit is checked before anything is parsed. ``loads``
reads other JSON with the same limits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

TYPE_CHECKING = False  # as in typing, which agents need not import
if TYPE_CHECKING:
    from typing import Any

MAX_FRAME_BYTES = 1 << 20
MAX_DEPTH = 100
"""Deeper values could be parsed, but not printed or encoded again."""
_MAX_DIGITS = 100
"""A float can hold any number with this many digits, at least approximately."""
UNFORKABLE, UNUSABLE = "unforkable", "unusable"
BLAMES_WRAPPER = {78: UNFORKABLE, 79: UNUSABLE}
"""Exit codes of a warm interpreter that cannot work the way its wrapper started it:
tasks cannot be forked from it, or cannot run in it at all."""

INTRA_OP_THREADS = "TFCLUSTER_INTRA_OP_THREADS"
INTER_OP_THREADS = "TFCLUSTER_INTER_OP_THREADS"
"""The variables with the default numbers of threads in, and for, operations."""

WORKDIR = "${TFCLUSTER_WORKDIR}"
"""Stands for the host's working directory in the texts of requirements."""

PROTOCOL = 1

Frame = dict[str, "Any"]


class WireError(Exception):
    """The other side sent something that is not a frame, or a frame is too long."""


def encode(
    frame: Mapping[str, Any], convert: Callable[[Any], Any] | None = None
) -> bytes:
    """The frame as one line. Raises WireError if it is longer than MAX_FRAME_BYTES.

    ``convert`` gets what JSON does not have. Surrogates (bytes that were not UTF-8)
    survive as ``\\udcXX`` escapes.
    """
    try:
        text = json.dumps(
            frame, separators=(",", ":"), allow_nan=False, default=convert
        )
    except ValueError as error:
        raise WireError(f"a {frame.get('type')!r} frame: {error}") from error
    line = text.encode() + b"\n"
    if len(line) > MAX_FRAME_BYTES:
        raise WireError(
            f"a {frame.get('type')!r} frame of {len(line)} bytes is over the limit of "
            f"{MAX_FRAME_BYTES}"
        )
    return line


def parse(line: bytes) -> Frame:
    """The frame in one line. Raises WireError if the line is not a frame."""
    try:
        frame = loads(line)
    except ValueError as error:
        raise WireError(f"not a frame: {line[:80]!r}") from error
    if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
        raise WireError(f"not a frame: {line[:80]!r}")
    return frame


def loads(text: bytes) -> Any:
    """The value of a JSON text in UTF-8. Raises ValueError.

    The value has only finite numbers, all of which ``float`` accepts, and is at most
    ``MAX_DEPTH`` deep. So callers need not expect NaN or RecursionError.
    """
    try:
        value = _DECODER.decode(text.decode("utf-8", "surrogatepass"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    # Counting brackets is fast, and shows that most texts are not deep.
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH:
        _check_depth([value])
    return value


def _check_depth(level: list[Any]) -> None:
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise ValueError("nested too deeply")


def _whole(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError("a number of too many digits")
    return int(digits)


def _real(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError("a number that is too large")
    return value


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a number")


_DECODER = json.JSONDecoder(
    parse_int=_whole, parse_float=_real, parse_constant=_no_number
)


class LineBuffer:
    """Splits a stream of bytes into lines of limited length."""

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self._limit = limit
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Every completed line without newline. Raises WireError for a long one."""
        start = len(self._rest)
        self._rest += data
        begin = 0
        while (end := self._rest.find(b"\n", max(start, begin))) >= 0:
            yield bytes(self._rest[begin:end])
            begin = end + 1
        del self._rest[:begin]
        if len(self._rest) > self._limit:
            self._rest.clear()
            raise WireError(f"a line of over {self._limit} bytes")


class Decoder:
    """Decodes frames from a stream of bytes, which may be cut anywhere."""

    def __init__(self) -> None:
        self._lines = LineBuffer()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Every frame that ``data`` completes. Raises WireError for a malformed one."""
        for line in self._lines.feed(data):
            if line:
                yield parse(line)
