"""What ranks report to each other, and messages about late and lost ranks. Pure.

A rank that fails sends the reason before it disconnects, and so does a program that
ends; a process that is killed sends nothing. So the other ranks can name the rank that
caused the failure, instead of the rank whose connection happened to break first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tfcluster.base.light_dataclasses import Struct
from tfcluster.protocol.frames import decoder
from tfcluster.runtime.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
)

FIRST_EXCHANGES = 8
"""They try every way between the ranks."""
_FIRST_S = 30.0
"""If one of these takes longer, perhaps nothing gets through: causes are named."""
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Variables of gRPC, in its order."""
_HELP = (
    "`tfcluster doctor` checks the hosts, and `tfcluster stacks` shows where ranks are"
)


@dataclass(frozen=True, slots=True)
class RankProgress:
    """The progress of a rank, as the rank itself reports it."""

    number: int
    """The number of its current or last exchange, counted from 1; 0 if none."""
    what: str
    """What that exchange does (``Signature.what``); empty before the first exchange."""
    since_s: float
    """Seconds since it entered that exchange (``inside``), or since it left it."""
    inside: bool

    @property
    def exchange(self) -> str:
        """The exchange in messages: ``exchange 41: gradients of adam``."""
        return f"exchange {self.number}: {self.what}"

    def has_come_to(self, number: int) -> bool:
        """Whether the rank is in exchange ``number``, or has passed it."""
        return self.number >= number


def missing(number: int, others: Mapping[int, RankProgress | None]) -> list[int]:
    """The ranks that have not reached exchange ``number``.

    A rank whose progress is None has not answered, and counts as missing.
    """
    return [
        rank
        for rank, progress in sorted(others.items())
        if progress is None or not progress.has_come_to(number)
    ]


def is_reporter(
    rank: int, number: int, others: Mapping[int, RankProgress | None]
) -> bool:
    """Whether this rank reports the missing ranks: it is the lowest rank present."""
    absent = missing(number, others)
    return rank < min(set(others) - set(absent), default=rank + 1)


def stalled_text(mine: RankProgress, others: Mapping[int, RankProgress | None]) -> str:
    """A message about the ranks for which ``mine`` waits, and what they did last."""
    absent = missing(mine.number, others)
    if not absent:
        return f"{mine.exchange} has taken {mine.since_s:.0f} s; all ranks are in it"
    first, *rest = (_absent_text(others[rank]) for rank in absent)
    waiting = f"(waiting for {mine.since_s:.0f} s)"
    late = f"rank {absent[0]} has not entered {mine.exchange} {waiting}"
    return "; ".join([f"{late}; {first}", *map(_named, absent[1:], rest)])


def inquiry_text(
    mine: RankProgress,
    others: Mapping[int, RankProgress | None],
    failed: Mapping[int, str],
) -> str:
    """Like ``stalled_text``, but a rank that has failed is not late.

    ``failed`` has the errors of ranks that have left. If no other rank is missing, the
    first of them is the reason: that rank may have given up because of a rank that has
    arrived since.
    """
    present = {
        rank: progress
        for rank, progress in others.items()
        if progress is not None or rank not in failed
    }
    if failed and not missing(mine.number, present):
        rank, error = min(failed.items())
        return f"rank {rank} has left: {error}"
    return stalled_text(mine, present)


def _named(rank: int, text: str) -> str:
    return f"rank {rank} has not entered it either; {text}"


def _absent_text(progress: RankProgress | None) -> str:
    if progress is None:
        return "it does not answer (stopped, or stuck outside Python?)"
    if progress.inside:
        return f"it has been in {progress.exchange} for {progress.since_s:.0f} s"
    if not progress.number:
        return "it has not exchanged anything yet"
    last = f"{progress.number}: {progress.what}"
    return f"its last exchange was {last}, {progress.since_s:.0f} s ago"


def unconnected_text(ranks: Sequence[int], waited_s: float) -> str:
    """A message about ranks that have not connected before the first exchange."""
    who = ", ".join(map(str, ranks))
    return f"rank {who} has not connected for {waited_s:.0f} s"


def patience_s(number: int, warning_s: float) -> float:
    """How long exchange ``number`` may take before anything is said.

    ``warning_s`` is ``runtime.stall_warning``; infinite if nothing is to be said.
    """
    limited = number <= FIRST_EXCHANGES and warning_s < math.inf
    return min(warning_s, _FIRST_S) if limited else warning_s


def possible_causes(
    environ: Mapping[str, str], hosts: Sequence[str], *, connected: bool
) -> str:
    """What may hold up the first exchange between ``hosts``, as far as we can tell.

    ``connected``: our own connections exist, so it is TensorFlow that gets nothing.
    """
    causes = []
    proxy = next((name for name in _PROXIES if environ.get(name)), None)
    exempt = environ.get("no_grpc_proxy") or environ.get("no_proxy") or ""
    words = [word.strip() for word in exempt.split(",") if word.strip()]
    proxied = [host for host in hosts if not host.endswith(tuple(words))]
    if connected and proxy is not None and proxied:
        causes.append(f"{proxy} is set, and no_proxy does not list {proxied[0]}")
    if len(set(hosts)) > 1:
        causes += [
            "a firewall between the hosts (`ports: LOW-HIGH` chooses the ports)",
            "an address that other hosts cannot reach (`address` under `hosts`)",
            "a network interface without a way to them (NCCL_SOCKET_IFNAME, for GPUs)",
        ]
    causes.append(
        "a first step that takes long to build, or waits for memory"
        if connected
        else "a rank that is still busy before its first exchange"
    )
    return f"what could be the cause: {'; '.join(causes)}. {_HELP}"


def awaited_text(rank: int, waited_s: float, exchange: str) -> str:
    """The line that a missing rank prints above its stack traces."""
    return f"rank {rank} has waited {waited_s:.0f} s for this rank to enter {exchange}"


# --- why ranks have left --------------------------------------------------------------


_KINDS: dict[str, type[CollectiveError]] = {
    kind.__name__: kind
    for kind in (
        CollectiveError,
        CollectiveMismatchError,
        CollectiveTimeoutError,
        PeerLostError,
    )
}


@dataclass(frozen=True, slots=True)
class ExitReport:
    """The report that a rank sends when it leaves."""

    number: int
    """The number of the last exchange that it completed or in which it failed."""
    kind: str = ""
    """The error's class; empty for a program that has just ended."""
    text: str = ""
    """The error's message, or the reason why the program has ended."""
    steps: int = 0
    """Training steps that it has done."""
    state: Mapping[str, str] = field(default_factory=dict)
    """The state that should be equal on all ranks that end after the same exchange."""

    @property
    def failed(self) -> bool:
        return bool(self.kind)


# --- what ranks send to each other ----------------------------------------------------


class PeerMessage(Struct):
    """Base class of all messages between two ranks' monitors."""


class ReadyMessage(PeerMessage):
    """The sender is connected to all ranks."""


class Query(PeerMessage):
    """Asks a rank for its progress; ``progress`` is the sender's."""

    progress: RankProgress


class Answer(PeerMessage):
    progress: RankProgress


class SignalMessage(PeerMessage):
    """The sender's process has got the signal ``number``, ``count`` times so far."""

    number: int
    count: int


class Exit(PeerMessage):
    """The last message of a rank."""

    report: ExitReport


class Heard(PeerMessage):
    """The sender has got ``Exit``."""


decode = decoder(PeerMessage)
"""The frame as a message. Raises ProtocolError."""


# --- verdicts -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Position:
    """The position of the rank that asks for a verdict; its exchange cannot succeed."""

    rank: int
    exchange: str
    """``exchange 41: gradients of adam``"""
    steps: int
    """Training steps that it has done."""
    line: str
    """The line of its program: ``train.py:30``; empty if not known."""


def cannot_succeed(number: int, reports: Mapping[int, ExitReport]) -> bool:
    """Whether exchange ``number`` can no longer succeed, given these reports."""
    return any(report.failed or report.number < number for report in reports.values())


def verdict(
    number: int,
    died: Collection[int],
    reports: Mapping[int, ExitReport],
    here: Position | None = None,
) -> CollectiveError | None:
    """The root cause of the failure of exchange ``number``; None if it is unknown.

    ``died`` are the ranks that have left without a report, and ``here`` describes the
    rank that asks.
    """
    if died:
        who = ", ".join(map(str, sorted(died)))
        return PeerLostError(
            f"rank {who} has left: its process ended or the connection to it broke"
        )
    for rank, report in sorted(reports.items()):
        if report.failed:
            return _passed_on(rank, report, number)
    for rank, report in sorted(reports.items()):
        if report.number < number:
            if not report.text and here and (report.steps or here.steps):
                return CollectiveMismatchError(_unequal_text(rank, report, here))
            return PeerLostError(_ended_text(rank, report))
    return None


def _passed_on(rank: int, report: ExitReport, number: int) -> CollectiveError:
    """The error to raise for another rank's failure.

    It has the same class if that rank failed in the same exchange.
    """
    kind = _KINDS.get(report.kind)
    if kind is None or (report.number != number and kind is not PeerLostError):
        return PeerLostError(f"rank {rank} has left: {report.text}")
    return kind(report.text)


def _ended_text(rank: int, report: ExitReport) -> str:
    after = (
        f"after exchange {report.number}" if report.number else "before any exchange"
    )
    why = f": {report.text}" if report.text else ""
    return f"rank {rank} has left {after}: its program has ended{why}"


def _unequal_text(rank: int, report: ExitReport, here: Position) -> str:
    """The message for a program that ended without an error, but before another."""
    where = f" at {here.line}" if here.line else ""
    return (
        f"the ranks took different numbers of steps: rank {rank} ended its program "
        f"after step {report.steps}, while rank {here.rank} continues after step "
        f"{here.steps} ({here.exchange}){where}. Rank {rank} decided to end because of "
        "values that differ between ranks: the loss of its own rows, a clock, random "
        "numbers. Use values that are equal on all ranks: metric.result(), or "
        "tfcluster.runtime.allreduce(loss)"
    )
