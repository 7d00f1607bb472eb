"""Talks to kept interpreters: finds, describes and ends them."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from tfcluster.agent.kept import places
from tfcluster.agent.light_dataclasses import dataclass
from tfcluster.wire import Decoder, Frame, WireError, encode

ANSWER_S = 5.0
"""How long an interpreter may take to answer."""
_ABOUT_S = 1.0
_READ_BYTES = 1 << 16
_TOLD = (
    "pid",
    "python",
    "purpose",
    "libraries",
    "age_s",
    "ends_in_s",
    "uses",
    "memory_bytes",
)


@dataclass(frozen=True, slots=True)
class Found:
    """A kept interpreter of this host."""

    path: str
    about: Frame

    def __str__(self) -> str:
        return f"the kept interpreter with pid {self.about.get('pid')}"


def found(environ: Mapping[str, str]) -> Iterator[Found]:
    """All kept interpreters that answer."""
    for path in places.sockets(environ):
        with suppress(OSError, WireError):
            about = ask(path, {"type": "about"}, timeout_s=_ABOUT_S)
            if about["type"] == "about":
                yield Found(path, about)


def ask(
    path: str, frame: Frame, fds: Sequence[int] = (), timeout_s: float = ANSWER_S
) -> Frame:
    """The answer to a request. Raises OSError or WireError if there is no answer."""
    with places.connect(path, timeout_s) as end:
        line = encode(frame)
        sent = socket.send_fds(end, [line], fds) if fds else 0
        end.sendall(line[sent:])
        return receive(end, Decoder())[0]


def receive(end: socket.socket, decoder: Decoder) -> list[Frame]:
    """The next frame, and any that came with it. Raises OSError, WireError."""
    while data := end.recv(_READ_BYTES):
        # Take all of them: a decoder that is left halfway repeats frames.
        if frames := list(decoder.feed(data)):
            return frames
    raise OSError("the connection has ended")


def listed(environ: Mapping[str, str]) -> list[dict[str, object]]:
    """The description of all kept interpreters of this host, for users."""
    return [{key: each.about.get(key) for key in _TOLD} for each in found(environ)]


def end(environ: Mapping[str, str], purpose: str | None) -> list[int]:
    """End all kept interpreters, or those for this purpose; returns their pids."""
    ended = []
    for each in found(environ):
        if purpose in (None, each.about.get("purpose")):
            with suppress(OSError, WireError):
                ended.append(int(ask(each.path, {"type": "end"})["pid"]))
    return ended
