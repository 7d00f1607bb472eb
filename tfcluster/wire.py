"""Frames on the channel between launcher and agent: one JSON object a line.

``docs/protocols.md`` lists the frames. This module knows only their outer form, so that
it can be fed any bytes: a frame is an object with a string ``type``, at most
``MAX_FRAME_BYTES`` long, and the limit is kept before anything is parsed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

TYPE_CHECKING = False  # as typing has it, which agents need not import
if TYPE_CHECKING:
    from typing import Any

MAX_FRAME_BYTES = 1 << 20
PROTOCOL = 1

Frame = dict[str, "Any"]


class WireError(Exception):
    """The other side sent something that is not a frame."""


def encode(frame: Mapping[str, Any]) -> bytes:
    """One line. Raises WireError where it would be longer than a peer may accept.

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
    """The frame that one line holds. Raises WireError for anything else."""
    try:
        frame = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a frame: {line[:80]!r}") from error
    if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
        raise WireError(f"not a frame: {line[:80]!r}")
    return frame


class LineBuffer:
    """Cuts a stream of bytes into lines; a line that grows too long is an error."""

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self._limit = limit
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Every line that ``data`` completes, without its end.

        Raises WireError as soon as the unfinished line is over the limit.
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
    """Frames from a stream of bytes in any portions."""

    def __init__(self) -> None:
        self._lines = LineBuffer()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Every frame that ``data`` completes. Raises WireError at a bad one."""
        for line in self._lines.feed(data):
            if line:
                yield parse(line)
