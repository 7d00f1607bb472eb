"""What the launcher asks an agent; ``docs/protocols.md`` says what frames mean."""

from __future__ import annotations

from collections.abc import Mapping

from tfcluster.base.light_dataclasses import Struct
from tfcluster.protocol.frames import Signed, decoder


class Request(Struct):
    """Base class of all requests."""


class ResultsRequest(Request):
    """Base class of the requests about results."""


class Open(Request):
    """The first frame; ``protocol`` and ``version`` are those of the launcher."""

    protocol: int
    version: str
    nonce: str
    run: str
    lease_s: float
    heartbeat_s: float
    grace_s: float
    witness: str | None


class PingRequest(Request):
    pass


class ClockRequest(Request):
    asked_s: float


class Hold(Request):
    count: int
    low: int | None
    high: int | None


class File(Struct):
    """One of the user's files; its path is relative to the folder, its digest SHA-256
    in hex."""

    path: str
    size: int
    mtime_ns: Signed
    mode: int
    digest: str


class SyncRequest(Request):
    folder: str
    original: str
    inodes: tuple[tuple[str, int], ...]
    files: tuple[File, ...]
    last: bool


class Part(Request):
    index: int
    offset: int
    data: str | None


class List(ResultsRequest):
    """Lists results in ``folder``, unless the host shares the launcher's files."""

    number: int
    folder: str
    inodes: tuple[tuple[str, int], ...]
    patterns: tuple[str, ...]


class Read(ResultsRequest):
    """Opens a listed file, of which ``size`` bytes are wanted."""

    number: int
    path: str
    size: int


class More(ResultsRequest):
    """Asks for the next piece of the opened file."""

    number: int


class Returned(ResultsRequest):
    """The launcher's folder now has the content with this digest at this path."""

    path: str
    digest: str


class EnvironmentSpec(Struct):
    """The requirements of an environment; ``python`` starts its base."""

    file: str
    files: tuple[tuple[str, str], ...]
    digest: str
    python: tuple[str, ...]
    configured: bool
    system_site_packages: bool


class Prepare(Request):
    setup: str | None
    env: Mapping[str, str | None]
    cwd: str
    log: str
    environment: EnvironmentSpec | None


class Warm(Request):
    key: str
    argv: tuple[str, ...]
    env: Mapping[str, str | None]
    cwd: str
    log: str
    prepend: Mapping[str, str]
    wrapped: bool


class Start(Request):
    task: str
    attempt: int
    argv: tuple[str, ...]
    env: Mapping[str, str | None]
    cwd: str
    log: str
    port: int | None
    parameter_port: int | None
    warm: str | None
    listens: bool
    watched: bool
    peers: str | None
    prepend: Mapping[str, str]


class StopRequest(Request):
    tasks: tuple[str, ...]
    grace_s: float
    signal: str


class StacksRequest(Request):
    tasks: tuple[str, ...]


class Close(Request):
    grace_s: float
    others_s: float = 0.0


decode = decoder(Request)
"""The frame as a request. Raises ProtocolError."""
