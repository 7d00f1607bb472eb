"""What the launcher asks an agent; ``docs/protocols.md`` says what frames mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tfcluster.light_dataclasses import dataclass
from tfcluster.protocol.frames import decoder
from tfcluster.protocol.wire import Frame


@dataclass(frozen=True, slots=True)
class Open:
    """The first frame; ``protocol`` and ``version`` are those of the launcher."""

    protocol: int
    version: str
    nonce: str
    run: str
    lease_s: float
    heartbeat_s: float
    grace_s: float
    witness: str | None


@dataclass(frozen=True, slots=True)
class Ping:
    pass


@dataclass(frozen=True, slots=True)
class Clock:
    asked_s: float


@dataclass(frozen=True, slots=True)
class Hold:
    count: int
    low: int | None
    high: int | None


@dataclass(frozen=True, slots=True)
class File:
    """One of the user's files; its path is relative to the folder, its digest SHA-256
    in hex."""

    path: str
    size: int
    mode: int
    digest: str


@dataclass(frozen=True, slots=True)
class Sync:
    folder: str
    original: str
    inodes: tuple[tuple[str, int], ...]
    files: tuple[File, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class Part:
    index: int
    offset: int
    data: str | None


@dataclass(frozen=True, slots=True)
class List:
    """Lists results in ``folder``, unless the host shares the launcher's files."""

    number: int
    folder: str
    inodes: tuple[tuple[str, int], ...]
    patterns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """Opens a listed file; the launcher already has ``have`` bytes with this digest."""

    number: int
    path: str
    size: int
    have: int
    digest: str


@dataclass(frozen=True, slots=True)
class More:
    """Asks for the next piece of the opened file."""

    number: int


@dataclass(frozen=True, slots=True)
class Returned:
    """The launcher's folder now has the content with this digest at this path."""

    path: str
    digest: str


@dataclass(frozen=True, slots=True)
class Environment:
    """The requirements of an environment; ``python`` starts its base."""

    file: str
    files: tuple[tuple[str, str], ...]
    digest: str
    python: tuple[str, ...]
    configured: bool
    system_site_packages: bool


@dataclass(frozen=True, slots=True)
class Prepare:
    setup: str | None
    env: Mapping[str, str | None]
    cwd: str
    log: str
    environment: Environment | None


@dataclass(frozen=True, slots=True)
class Warm:
    key: str
    argv: tuple[str, ...]
    env: Mapping[str, str | None]
    cwd: str
    log: str
    prepend: Mapping[str, str]
    wrapped: bool


@dataclass(frozen=True, slots=True)
class Start:
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


@dataclass(frozen=True, slots=True)
class Stop:
    tasks: tuple[str, ...]
    grace_s: float
    signal: str


@dataclass(frozen=True, slots=True)
class Stacks:
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Close:
    grace_s: float
    others_s: float = 0.0


OfResults = List | Read | More | Returned

Request = (
    Open
    | Ping
    | Clock
    | Hold
    | Sync
    | Part
    | OfResults
    | Prepare
    | Warm
    | Start
    | Stop
    | Stacks
    | Close
)

decode: Callable[[Frame], Request] = decoder(*Request.__args__)
"""The frame as a request. Raises ProtocolError."""
