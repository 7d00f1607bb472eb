"""What a task reports to its agent, which passes most of it on to the launcher.

``docs/protocols.md`` says what the events mean.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfcluster.base.light_dataclasses import Struct
from tfcluster.protocol.frames import Number, decoder


class TaskEvent(Struct):
    """Base class of all events."""


class PhaseMessage(TaskEvent):
    phase: str


class Versions(TaskEvent):
    versions: Mapping[str, str]


class EpochPosition(Struct):
    """Where the program is in ``fit``; a metric that is not finite is None."""

    epoch: int
    epochs: int | None
    epoch_step: int
    epoch_steps: int | None
    metrics: Mapping[str, Number | None]


class Step(TaskEvent):
    """``step`` steps are complete; ``bytes`` were exchanged so far."""

    step: int
    steps_per_s: float | None
    wait_share: float | None
    bytes: int | None
    position: EpochPosition | None


class Epoch(TaskEvent):
    """The end of an epoch, counted from 1."""

    epoch: int
    step: int | None
    metrics: Mapping[str, Number | None]


class ExchangeTotal(Struct):
    """The total cost of a task's exchanges for one purpose."""

    what: str
    count: int = 0
    seconds: float = 0.0
    bytes: int = 0


class ExchangesMessage(TaskEvent):
    totals: tuple[ExchangeTotal, ...]


class Serving(TaskEvent):
    """The statistics of a ps; the staleness of gradients is measured in updates."""

    applied: int
    dropped: int
    staleness_mean: float
    staleness_max: int
    bytes: int


class Waiting(TaskEvent):
    """The task waits in an operation for these ranks, if they are known."""

    since_s: float
    what: str
    ranks: tuple[int, ...] = ()


class TraceMessage(TaskEvent):
    """Events ``first`` to ``last`` as a JSON text, which nobody parses on the way."""

    first: int
    last: int
    base_us: int
    names: tuple[str, ...]
    events: str


class WarningMessage(TaskEvent):
    text: str


class NoteMessage(TaskEvent):
    text: str


class ColdStart(TaskEvent):
    text: str


class FailureMessage(TaskEvent):
    cause: str


class Stack(TaskEvent):
    """Answers ``local.StacksMessage``."""

    text: str
    waiting: Waiting | None


class ServerMessage(TaskEvent):
    port: int


class ExchangedMessage(TaskEvent):
    pass


decode = decoder(TaskEvent)
decode_server = decoder(ServerMessage)
"""Both raise ProtocolError."""
