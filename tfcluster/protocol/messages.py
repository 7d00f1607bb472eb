"""What an agent tells the launcher; ``docs/protocols.md`` says what frames mean."""

from __future__ import annotations

from collections.abc import Mapping

from tfcluster.base.light_dataclasses import Struct
from tfcluster.protocol.frames import Signed, decoder


class Message(Struct):
    """Base class of all messages."""


class ResultsMessage(Message):
    """Answers the request with this number."""

    number: int


class OfTask(Message):
    """About an attempt at a task."""

    task: str
    attempt: int


class Hello(Message):
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


class Ping(Message):
    pass


class Clock(Message):
    asked_s: float
    monotonic_s: float


class Held(Message):
    """``cause``: why there are fewer ports than requested."""

    ports: tuple[int, ...]
    cause: str | None


class Wants(Message):
    """The parts of files that are needed: index, offset and length of each."""

    parts: tuple[tuple[int, int, int], ...]


class Synced(Message):
    cwd: str
    count: int


class Unsynced(Message):
    cause: str


class Result(Struct):
    path: str
    size: int
    mtime_ns: Signed
    mode: int


class Listed(ResultsMessage):
    """A part of the list; ``refused``: paths that are not sent, and why."""

    shared: bool
    folder: str
    files: tuple[Result, ...]
    refused: tuple[tuple[str, str], ...]
    last: bool


class Unlisted(ResultsMessage):
    cause: str


class Working(ResultsMessage):
    pass


class Piece(ResultsMessage):
    offset: int
    data: str


class Complete(ResultsMessage):
    digest: str
    changed: bool


class Unread(ResultsMessage):
    cause: str


class Making(Message):
    text: str | None


class Prepared(Message):
    python: str | None
    environment: str | None


class Unprepared(Message):
    cause: str
    line: int | None
    of: str
    tail: tuple[str, ...]


class Warmed(Message):
    key: str


class Cold(Message):
    key: str
    cause: str
    tail: tuple[str, ...]
    unfit: bool
    wrapper: str | None


class Started(OfTask):
    pid: int


class Listening(OfTask):
    port: int


class Intruder(OfTask):
    port: int
    pid: int | None
    uid: int


class Event(OfTask):
    """What the task itself has sent, unchecked."""

    event: Mapping[str, object]


class Gpu(Struct):
    """``busy`` is a share; None: unknown, as in part of a divided GPU."""

    gpu: int
    uuid: str
    busy: float | None
    memory_bytes: int | None
    memory_total_bytes: int | None


class Usage(OfTask):
    rss_bytes: int
    cpu_s: float
    processes: int
    gpus: tuple[Gpu, ...]


class Log(OfTask):
    """``dropped`` lines came before these, and are only in the file."""

    lines: tuple[str, ...]
    dropped: int


class LogError(OfTask):
    cause: str
    dropped_bytes: int


class Exited(OfTask):
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


class Settled(OfTask):
    pass


class Failed(OfTask):
    cause: str


class Swept(Message):
    count: int


class Unkillable(Message):
    pids: tuple[int, ...]


class Note(Message):
    text: str
    signal: str | None = None
    guard: int | None = None


class Fault(Message):
    cause: str


class Bye(Message):
    swept: int
    others: bool


decode = decoder(Message)
"""The frame as a message. Raises ProtocolError."""
