"""What an agent tells the launcher; ``docs/protocols.md`` says what frames mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tfcluster.light_dataclasses import dataclass
from tfcluster.protocol.frames import Signed, decoder
from tfcluster.protocol.wire import Frame


@dataclass(frozen=True, slots=True)
class Hello:
    """Answers ``open``; ``protocol`` and ``version`` are those of the agent."""

    protocol: int
    version: str
    nonce: str
    pid: int
    host: str
    python: str
    root: bool
    cpus: int
    boot_id: str
    network: str
    package: str
    way_in: str | None
    addresses: tuple[str, ...]
    gpus: tuple[str, ...]
    clock: float
    shared: bool | None


@dataclass(frozen=True, slots=True)
class Ping:
    pass


@dataclass(frozen=True, slots=True)
class Clock:
    asked_s: float
    monotonic_s: float


@dataclass(frozen=True, slots=True)
class Held:
    """``cause``: why there are fewer ports than requested."""

    ports: tuple[int, ...]
    cause: str | None


# --- the workdir ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wants:
    """The parts of files that are needed: index, offset and length of each."""

    parts: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Synced:
    cwd: str
    count: int


@dataclass(frozen=True, slots=True)
class Unsynced:
    cause: str


# --- results ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Result:
    """A file that matches."""

    path: str
    size: int
    mtime_ns: Signed
    mode: int


@dataclass(frozen=True, slots=True)
class Listed:
    """``refused``: paths that are not sent, and why; ``more``: how many others."""

    number: int
    shared: bool
    folder: str
    files: tuple[Result, ...]
    refused: tuple[tuple[str, str], ...]
    more: int
    last: bool


@dataclass(frozen=True, slots=True)
class Unlisted:
    number: int
    cause: str


@dataclass(frozen=True, slots=True)
class Reading:
    number: int
    offset: int


@dataclass(frozen=True, slots=True)
class Working:
    number: int


@dataclass(frozen=True, slots=True)
class Piece:
    number: int
    offset: int
    data: str


@dataclass(frozen=True, slots=True)
class Complete:
    number: int
    digest: str
    changed: bool


@dataclass(frozen=True, slots=True)
class Unread:
    number: int
    cause: str


# --- the preparation --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Making:
    text: str | None


@dataclass(frozen=True, slots=True)
class Prepared:
    python: str | None
    environment: str | None


@dataclass(frozen=True, slots=True)
class Unprepared:
    cause: str
    line: int | None
    of: str
    tail: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Warmed:
    key: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Cold:
    key: str
    cause: str
    tail: tuple[str, ...]
    unfit: bool
    wrapper: str | None


# --- tasks ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    task: str
    attempt: int
    pid: int
    start_time: int


@dataclass(frozen=True, slots=True)
class Listening:
    task: str
    attempt: int
    port: int


@dataclass(frozen=True, slots=True)
class Intruder:
    task: str
    attempt: int
    port: int
    pid: int | None
    uid: int


@dataclass(frozen=True, slots=True)
class Event:
    """What the task itself has sent, unchecked."""

    task: str
    attempt: int
    event: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Gpu:
    """``busy`` is a share; None: unknown, as in part of a divided GPU."""

    gpu: int
    uuid: str
    busy: float | None
    memory_bytes: int | None
    memory_total_bytes: int | None


@dataclass(frozen=True, slots=True)
class Usage:
    task: str
    attempt: int
    rss_bytes: int
    cpu_s: float
    processes: int
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True)
class Log:
    task: str
    attempt: int
    lines: tuple[str, ...]
    dropped: int
    dropped_bytes: int


@dataclass(frozen=True, slots=True)
class LogError:
    task: str
    attempt: int
    cause: str
    dropped_bytes: int


@dataclass(frozen=True, slots=True)
class Exited:
    task: str
    attempt: int
    code: int | None
    signal: str | None
    oom: bool
    tail: tuple[str, ...]
    seconds: float
    ago_s: float
    death: int
    stopped: bool
    exchanged: bool
    cpu_s: float
    max_rss_bytes: int


@dataclass(frozen=True, slots=True)
class Settled:
    task: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Failed:
    task: str
    attempt: int
    cause: str
    errno: int


# --- the end ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Swept:
    """``task`` and ``attempt`` are None if the processes belonged to no task."""

    count: int
    processes: tuple[str, ...]
    task: str | None = None
    attempt: int | None = None


@dataclass(frozen=True, slots=True)
class Unkillable:
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Note:
    text: str
    signal: str | None = None
    guard: int | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    cause: str


@dataclass(frozen=True, slots=True)
class Bye:
    swept: int
    others: bool


OfResults = Listed | Unlisted | Reading | Working | Piece | Complete | Unread

OfTasks = (
    Started
    | Listening
    | Intruder
    | Event
    | Usage
    | Log
    | LogError
    | Exited
    | Settled
    | Failed
)

Message = (
    Hello
    | Ping
    | Clock
    | Held
    | Wants
    | Synced
    | Unsynced
    | OfResults
    | Making
    | Prepared
    | Unprepared
    | Warmed
    | Cold
    | OfTasks
    | Swept
    | Unkillable
    | Note
    | Fault
    | Bye
)

decode: Callable[[Frame], Message] = decoder(*Message.__args__)
"""The frame as a message. Raises ProtocolError."""
