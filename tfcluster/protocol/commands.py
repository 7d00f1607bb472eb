"""What other commands ask the launcher of a run, through files in the run's folder."""

from __future__ import annotations

from tfcluster.base.light_dataclasses import Struct
from tfcluster.protocol.frames import decoder


class Command(Struct):
    """Base class of all requests."""


class StacksCommand(Command):
    tasks: tuple[str, ...]


class Fetch(Command):
    """What is empty or None is as configured."""

    patterns: tuple[str, ...] = ()
    all: bool | None = None
    force: bool = False


class NewHost(Struct):
    host: str
    slots: int | None


class ResizeCommand(Command):
    """``workers`` is None if the new hosts determine the number."""

    workers: int | None
    hosts: tuple[NewHost, ...]
    now: bool


decode = decoder(Command)
"""The request of a file. Raises ProtocolError."""
