"""Between an agent and other processes on its host, for which it acts."""

from __future__ import annotations

from collections.abc import Mapping

from tfcluster.base.light_dataclasses import Struct
from tfcluster.protocol.frames import decoder
from tfcluster.protocol.requests import EnvironmentSpec


class Make(Struct):
    """The only request; ``python`` starts the base of the environment."""

    environment: EnvironmentSpec
    python: tuple[str, ...]
    cwd: str


class OfMaker(Struct):
    """Base class of the answers."""


class MakerOutput(OfMaker):
    text: str


class Made(OfMaker):
    python: str
    home: str


class Unmade(OfMaker):
    cause: str


class Fork(Struct):
    """Two descriptors come with it: the task's output and its events socket."""

    id: int
    argv: tuple[str, ...]
    env: Mapping[str, str | None]
    cwd: str


class OfInterpreter(Struct):
    """Base class of what a warm interpreter says."""


class Ready(OfInterpreter):
    """All imports are complete."""


class Unfit(OfInterpreter):
    cause: str


class Forked(OfInterpreter):
    id: int
    pid: int


class ForkFailed(OfInterpreter):
    id: int
    cause: str


class ClaimRequest(Struct):
    """A process is going to train; ``command`` is for messages."""

    command: str


class Claimed(Struct):
    """Answers a claim: ``number`` processes have had the rank before.

    ``pid`` and ``command`` are those of the last one. If it is ``taken``, it still has
    the rank, and this process does not get it.
    """

    taken: bool
    number: int
    pid: int | None
    command: str | None


class StacksMessage(Struct):
    """Asks a task for its stacks."""


decode_make = decoder(Make)
decode_of_maker = decoder(OfMaker)
decode_fork = decoder(Fork)
decode_of_interpreter = decoder(OfInterpreter)
decode_claim = decoder(ClaimRequest)
decode_claimed = decoder(Claimed)
"""All raise ProtocolError."""
