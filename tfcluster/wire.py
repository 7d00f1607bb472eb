"""Frames on the channel between launcher and agent: one JSON object per line.

``docs/protocols.md`` lists the frames. This module knows only their outer form and
accepts arbitrary bytes: a frame is an object with a string ``type``, at most
``MAX_FRAME_BYTES`` long. The limit is checked before anything is parsed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

TYPE_CHECKING = False  # as in typing, which agents need not import
if TYPE_CHECKING:
    from typing import Any

MAX_FRAME_BYTES = 1 << 20
PROTOCOL = 1

Frame = dict[str, "Any"]


class WireError(Exception):
    """The other side sent something that is not a frame, or a frame is too long."""


def encode(frame: Mapping[str, Any]) -> bytes:
    """The frame as one line. Raises WireError if it is longer than MAX_FRAME_BYTES.

    Surrogates (bytes that were not UTF-8) survive as ``\\udcXX`` escapes.
    """
    line = json.dumps(frame, separators=(",", ":")).encode() + b"\n"
    if len(line) > MAX_FRAME_BYTES:
        raise WireError(
            f"a {frame.get('type')!r} frame of {len(line)} bytes is over the limit of "
            f"{MAX_FRAME_BYTES}"
        )
    return line


def parse(line: bytes) -> Frame:
    """The frame in one line. Raises WireError if the line is not a frame."""
    try:
        frame = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a frame: {line[:80]!r}") from error
    if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
        raise WireError(f"not a frame: {line[:80]!r}")
    return frame


class LineBuffer:
    """Splits a stream of bytes into lines of limited length."""

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self._limit = limit
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Every line that ``data`` completes, without its newline.

        Raises WireError as soon as the unfinished line exceeds the limit.
        """
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

    @property
    def rest(self) -> bytes:
        """The unfinished last line."""
        return bytes(self._rest)


class Decoder:
    """Decodes frames from a stream of bytes, which may be cut anywhere."""

    def __init__(self) -> None:
        self._lines = LineBuffer()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Every frame that ``data`` completes. Raises WireError for a malformed one."""
        for line in self._lines.feed(data):
            if line:
                yield parse(line)

    @property
    def rest(self) -> bytes:
        """The beginning of a frame that is not complete yet."""
        return self._lines.rest
