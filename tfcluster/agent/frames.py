"""The launcher's requests, checked and typed. Pure; does not know who handles them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping

from tfcluster.light_dataclasses import dataclass
from tfcluster.wire import Frame, WireError

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from typing import Any, TypeVar

    T = TypeVar("T")

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Open:
    protocol: int
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
    """One of the user's files; its path is relative to the folder."""

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
class Prepare:
    setup: str | None
    env: Mapping[str, str | None]
    cwd: str
    log: str
    environment: Mapping[str, Any] | None


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
    signum: int


@dataclass(frozen=True, slots=True)
class Stacks:
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Close:
    grace_s: float
    others_s: float


Results = List | Read | More | Returned

Request = (
    Open
    | Ping
    | Clock
    | Hold
    | Sync
    | Part
    | Results
    | Prepare
    | Warm
    | Start
    | Stop
    | Stacks
    | Close
)


def parse_request(frame: Frame) -> Request | None:
    """The frame as a request; None if a newer version added its type.

    Raises WireError if a key is missing or has the wrong kind of value.
    """
    reader = _READERS.get(frame["type"])
    return reader(_Keys(frame)) if reader is not None else None


class _Keys:
    """Checked access to the keys of a frame."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def get(self, key: str, kind: type[T], wanted: str) -> T:
        value = self._frame.get(key, _MISSING)
        # bool is a subclass of int, but true is not accepted as a number here.
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
        raise WireError(f"{self._frame['type']!r} frame: {key!r} must be {wanted}")

    def text(self, key: str) -> str:
        return self.get(key, str, "a string")

    def whole(self, key: str) -> int:
        value = self.get(key, int, "a whole number")
        if value < 0:
            raise WireError(f"{self._frame['type']!r} frame: {key!r} is negative")
        return value

    def seconds(self, key: str) -> float:
        value = self._frame.get(key)
        if isinstance(value, float) and 0 <= value < float("inf"):
            return value
        return float(self.whole(key))

    def optional_seconds(self, key: str) -> float | None:
        return None if self._frame.get(key) is None else self.seconds(key)

    def flag(self, key: str) -> bool:
        return self.get(key, bool, "true or false")

    def optional_flag(self, key: str) -> bool:
        return self._frame.get(key) is not None and self.flag(key)

    def optional_object(self, key: str) -> Mapping[str, Any] | None:
        found = self._frame.get(key)
        return None if found is None else self.get(key, dict, "an object")

    def optional_whole(self, key: str) -> int | None:
        return None if self._frame.get(key) is None else self.whole(key)

    def optional_text(self, key: str) -> str | None:
        return None if self._frame.get(key) is None else self.text(key)

    def texts(self, key: str) -> tuple[str, ...]:
        values = self.get(key, list, "a list of strings")
        if not all(isinstance(value, str) for value in values):
            raise WireError(
                f"{self._frame['type']!r} frame: {key!r} must be a list of strings"
            )
        return tuple(values)

    def env(self, key: str) -> dict[str, str | None]:
        values = self.get(key, dict, "an object")
        if not all(isinstance(value, str | None) for value in values.values()):
            raise WireError(
                f"{self._frame['type']!r} frame: {key!r} must hold strings and nulls"
            )
        return dict(values)

    def folders(self, key: str) -> dict[str, str]:
        """Variable -> folder to prepend; the key may be missing."""
        values = self._frame.get(key, {})
        if not isinstance(values, dict) or not all(
            isinstance(value, str) for value in values.values()
        ):
            raise WireError(f"{self._frame['type']!r} frame: {key!r} must hold strings")
        return dict(values)

    def rows(self, key: str, *kinds: type) -> list[Any]:
        """A list of lists, each with one value of each of these kinds."""
        rows = self.get(key, list, "a list of lists")
        for row in rows:
            fits = isinstance(row, list) and len(row) == len(kinds)
            if not fits or not all(map(isinstance, row, kinds)):
                raise WireError(f"{self._frame['type']!r} frame: {key!r} has {row!r}")
        return rows

    def signal(self, key: str) -> int:
        name = self.text(key)
        try:
            return signal.Signals[f"SIG{name}"].value
        except KeyError:
            raise WireError(f"no signal is called {name!r}") from None


def _open(keys: _Keys) -> Open:
    return Open(
        protocol=keys.whole("protocol"),
        nonce=keys.text("nonce"),
        run=keys.text("run"),
        lease_s=keys.seconds("lease_s"),
        heartbeat_s=keys.seconds("heartbeat_s"),
        grace_s=keys.seconds("grace_s"),
        witness=keys.optional_text("witness"),
    )


def _sync(keys: _Keys) -> Sync:
    return Sync(
        folder=keys.text("folder"),
        original=keys.text("original"),
        inodes=tuple((path, number) for path, number in keys.rows("inodes", str, int)),
        files=tuple(File(*row) for row in keys.rows("files", str, int, int, str)),
        last=keys.flag("last"),
    )


def _list(keys: _Keys) -> List:
    return List(
        number=keys.whole("number"),
        folder=keys.text("folder"),
        inodes=tuple((path, number) for path, number in keys.rows("inodes", str, int)),
        patterns=keys.texts("patterns"),
    )


def _read(keys: _Keys) -> Read:
    return Read(
        number=keys.whole("number"),
        path=keys.text("path"),
        size=keys.whole("size"),
        have=keys.whole("have"),
        digest=keys.text("digest"),
    )


def _prepare(keys: _Keys) -> Prepare:
    return Prepare(
        setup=keys.optional_text("setup"),
        env=keys.env("env"),
        cwd=keys.text("cwd"),
        log=keys.text("log"),
        environment=keys.optional_object("environment"),
    )


def _warm(keys: _Keys) -> Warm:
    return Warm(
        key=keys.text("key"),
        argv=keys.texts("argv"),
        env=keys.env("env"),
        cwd=keys.text("cwd"),
        log=keys.text("log"),
        prepend=keys.folders("prepend"),
        wrapped=keys.optional_flag("wrapped"),
    )


def _start(keys: _Keys) -> Start:
    return Start(
        task=keys.text("task"),
        attempt=keys.whole("attempt"),
        argv=keys.texts("argv"),
        env=keys.env("env"),
        cwd=keys.text("cwd"),
        log=keys.text("log"),
        port=keys.optional_whole("port"),
        parameter_port=keys.optional_whole("parameter_port"),
        warm=keys.optional_text("warm"),
        listens=keys.flag("listens"),
        watched=keys.flag("watched"),
        peers=keys.optional_text("peers"),
        prepend=keys.folders("prepend"),
    )


_READERS: Mapping[str, Callable[[_Keys], Request]] = {
    "open": _open,
    "ping": lambda keys: Ping(),
    "clock": lambda keys: Clock(keys.seconds("asked_s")),
    "hold": lambda keys: Hold(
        keys.whole("count"), keys.optional_whole("low"), keys.optional_whole("high")
    ),
    "sync": _sync,
    "part": lambda keys: Part(
        keys.whole("index"), keys.whole("offset"), keys.optional_text("data")
    ),
    "list": _list,
    "read": _read,
    "more": lambda keys: More(keys.whole("number")),
    "returned": lambda keys: Returned(keys.text("path"), keys.text("digest")),
    "prepare": _prepare,
    "warm": _warm,
    "start": _start,
    "stop": lambda keys: Stop(
        keys.texts("tasks"), keys.seconds("grace_s"), keys.signal("signal")
    ),
    "stacks": lambda keys: Stacks(keys.texts("tasks")),
    "close": lambda keys: Close(
        keys.seconds("grace_s"), keys.optional_seconds("others_s") or 0.0
    ),
}
