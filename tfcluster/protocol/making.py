"""Between an agent and the process that makes an environment for it."""

from __future__ import annotations

from collections.abc import Callable

from tfcluster.light_dataclasses import dataclass
from tfcluster.protocol.frames import decoder
from tfcluster.protocol.requests import Environment
from tfcluster.protocol.wire import Frame


@dataclass(frozen=True, slots=True)
class Make:
    """The only request; ``python`` starts the base of the environment."""

    environment: Environment
    python: tuple[str, ...]
    cwd: str


@dataclass(frozen=True, slots=True)
class Say:
    text: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line of pip's output."""

    text: str


@dataclass(frozen=True, slots=True)
class Made:
    python: str
    home: str


@dataclass(frozen=True, slots=True)
class Unmade:
    cause: str


Answer = Say | Line | Made | Unmade

decode_request: Callable[[Frame], Make] = decoder(Make)
decode_answer: Callable[[Frame], Answer] = decoder(*Answer.__args__)
"""Both raise ProtocolError."""
