"""Between an agent and the process that makes an environment for it."""

from __future__ import annotations

from tfcluster.light_dataclasses import Struct
from tfcluster.protocol.frames import decoder
from tfcluster.protocol.requests import Environment


class Make(Struct):
    """The only request; ``python`` starts the base of the environment."""

    environment: Environment
    python: tuple[str, ...]
    cwd: str


class Answer(Struct):
    """Base class of all answers."""


class Say(Answer):
    text: str


class Line(Answer):
    """A line of pip's output."""

    text: str


class Made(Answer):
    python: str
    home: str


class Unmade(Answer):
    cause: str


decode_request = decoder(Make)
decode_answer = decoder(Answer)
"""Both raise ProtocolError."""
