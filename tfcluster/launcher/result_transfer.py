"""Fetches the results of one host: the launcher's counterpart of the agent's sender.

Blocks, so it runs in its own thread. Nothing that happens on the host or here raises:
the outcome names what could not be fetched.
"""

from __future__ import annotations

import base64
import errno
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

from tfcluster.agent.file_names import (
    BY_HOST,
    RESULT_FILES,
    RESULT_PIECE_BYTES,
    is_inside,
    is_never,
    is_wanted,
)
from tfcluster.base.light_dataclasses import dataclass, field
from tfcluster.launcher.result_placement import (
    PartialFile,
    PlacementError,
    ResultFolder,
)
from tfcluster.protocol import messages, requests

STALL_S = 30.0
"""A host that sends nothing for this long is given up."""
_LOOK_S = 0.25
_VIOLATED = "its agent violated the protocol"
_MOST_LISTED = RESULT_FILES + 1000
"""Limit of a list's rows and empty answers: an agent that violates it is stopped."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_WINDOW = 8
"""Pieces on their way at a time. Other frames of the agent, such as heartbeats, wait
behind them: on a slow line for some seconds."""


class _Ended(Exception):
    """Nothing more can be fetched from this host; the message says why."""


class _FileError(Exception):
    """This file cannot be fetched; the message says why."""


@dataclass(slots=True)
class Inbox:
    """The answers of one host; ``end`` says that no more will come, and why."""

    answers: SimpleQueue[messages.ResultsMessage | None] = field(
        default_factory=SimpleQueue
    )
    cause: str | None = None
    """Why no more will come."""
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """The numbers of the requests to the host: answers have them, too."""

    def put(self, answer: messages.ResultsMessage) -> None:
        self.answers.put(answer)

    def end(self, cause: str) -> None:
        self.cause = cause
        self.answers.put(None)


@dataclass(slots=True)
class TransferOutcome:
    """What became of a host's results; one thread writes, others read it."""

    host: str
    shared: bool = False
    folder: str = ""
    files: int = 0
    """The number of matching files, followed by their bytes."""
    bytes: int = 0
    done_bytes: int = 0
    """The part of ``bytes`` that was fetched, or is known to be here."""
    sent_bytes: int = 0
    fetched: int = 0
    unchanged: int = 0
    kept: list[tuple[str, str]] = field(default_factory=list)
    """Files here that were not replaced, and why."""
    growing: list[tuple[str, str]] = field(default_factory=list)
    missed: list[tuple[str, str]] = field(default_factory=list)
    cause: str | None = None
    steps: int = 0
    """Grows as long as something happens."""
    over: bool = False

    @property
    def well(self) -> bool:
        return self.cause is None and not self.missed


@dataclass(frozen=True, slots=True)
class WantedFiles:
    folder: str
    """The workdir on the host, if it does not share this machine's workdir."""
    inodes: tuple[tuple[str, int], ...]
    patterns: tuple[str, ...]


class HostTransfer:
    """Fetches from one host. ``send`` may be called from any thread."""

    def __init__(
        self,
        outcome: TransferOutcome,
        wanted: WantedFiles,
        here: ResultFolder,
        *,
        send: Callable[[requests.Request], None],
        inbox: Inbox,
        stopped: Callable[[], str | None] = lambda: None,
        stall_s: float = STALL_S,
    ) -> None:
        """``stopped`` returns why the fetch has to end, or None."""
        self._outcome = outcome
        self._wanted = wanted
        self._here = here
        self._send = send
        self._inbox = inbox
        self._stopped = stopped
        self._stall_s = stall_s
        self._left: list[messages.Result] = []

    def run(self) -> None:
        """Fetch everything; the outcome says what became of it."""
        outcome = self._outcome
        try:
            self._left = self._list()
            while self._left:
                self._fetch(self._left[0])
                self._left.pop(0)
        except _Ended as error:
            self._leave(str(error))
        except Exception as error:
            # A thread's exception would go unseen, and the outcome would look good.
            self._leave(f"internal error: {type(error).__name__}: {error}")
        finally:
            outcome.over = True

    def _leave(self, cause: str) -> None:
        self._outcome.cause = cause
        for remote in self._left:
            self._outcome.missed.append((remote.path, "not fetched"))

    def _list(self) -> list[messages.Result]:
        number, outcome, wanted = next(self._inbox.numbers), self._outcome, self._wanted
        self._send(requests.List(number, wanted.folder, wanted.inodes, wanted.patterns))
        files: dict[str, messages.Result] = {}
        listed, last = 0, False
        while not last:
            answer = self._receive(number)
            if isinstance(answer, messages.Unlisted):
                raise _Ended(answer.cause)
            if not isinstance(answer, messages.Listed):
                raise _Ended(_VIOLATED)
            outcome.shared, outcome.folder = answer.shared, answer.folder
            listed += max(len(answer.files) + len(answer.refused), 1)
            if listed > _MOST_LISTED:
                raise _Ended("its agent lists too many files")
            for file in answer.files:
                if problem := self._problem(file.path):
                    outcome.missed.append((file.path, problem))
                else:
                    files[file.path] = file
            outcome.missed += answer.refused
            last = answer.last
        outcome.files = len(files)
        outcome.bytes = sum(file.size for file in files.values())
        return list(files.values())

    def _problem(self, path: str) -> str | None:
        if not is_inside(path):
            return "its name leads out of the working directory"
        # A host must not send files that came from another host, either.
        never = is_never(path) or BY_HOST in path.split("/")
        if never or not is_wanted(path, self._wanted.patterns):
            return "nobody asked for it"
        return None

    def _fetch(self, remote: messages.Result) -> None:
        outcome, here = self._outcome, self._here
        before = outcome.done_bytes
        try:
            if here.has(remote):
                outcome.unchanged += 1
            elif why := here.objection(remote):
                outcome.kept.append((here.path(remote), why))
            else:
                self._receive_file(remote)
        except (_FileError, PlacementError) as error:
            outcome.missed.append((remote.path, str(error)))
        except OSError as error:
            cause = f"{error.filename or remote.path}: {error.strerror}"
            if error.errno in _FULL:
                raise _Ended(f"no space is left here: {cause}") from error
            outcome.missed.append((remote.path, f"cannot be written here: {cause}"))
        outcome.done_bytes = before + remote.size

    def _receive_file(self, remote: messages.Result) -> None:
        outcome, here = self._outcome, self._here
        with here.partial(remote) as partial:
            number = next(self._inbox.numbers)
            partial.begin(remote.size)
            self._send(requests.Read(number, remote.path, remote.size))
            end = self._pieces(number, remote.size, partial)
            if end.digest != partial.hash.hexdigest():
                raise _FileError("what arrived has another digest than on the host")
            if why := here.place(partial, remote):
                outcome.kept.append((here.path(remote), why))
                return
        outcome.fetched += 1
        if here.path(remote) == remote.path:
            # The workdir here now has this content.
            self._send(requests.Returned(remote.path, end.digest))
        if end.changed:
            text = (
                f"it changed while it was sent; its first {remote.size} bytes are here"
            )
            outcome.growing.append((remote.path, text))

    def _tick(self) -> None:
        """Note a part of a long step, or a silent moment. May raise _Ended."""
        self._outcome.steps += 1
        if why := self._stopped():
            raise _Ended(why)

    def _pieces(
        self, number: int, size: int, partial: PartialFile
    ) -> messages.Complete:
        """Receive the next ``size`` bytes; returns the final answer."""
        left = -(-size // RESULT_PIECE_BYTES) + 1  # the last answer is `complete`
        asked = 0
        while True:
            while asked < min(left, _WINDOW):
                self._send(requests.More(number))
                asked += 1
            answer = self._receive(number)
            if isinstance(answer, messages.Unread):
                raise _FileError(answer.cause)
            asked -= 1
            left = max(1, left - 1)  # pieces may be shorter than they could be
            if isinstance(answer, messages.Complete):
                if size:
                    raise _Ended(f"{_VIOLATED}: pieces are missing")
                return answer
            data = _decoded(answer)
            size -= len(data)
            if size < 0:
                raise _Ended(f"{_VIOLATED}: it sent too much")
            partial.write(data)
            self._outcome.done_bytes += len(data)
            self._outcome.sent_bytes += len(data)

    def _receive(self, number: int) -> messages.ResultsMessage:
        """The next answer with this number. Raises _Ended without contact."""
        heard_s = time.monotonic()
        while True:
            self._tick()
            try:
                # Nothing more can come if we lost contact in an earlier fetch.
                wait_s = _LOOK_S if self._inbox.cause is None else 0.0
                item = self._inbox.answers.get(timeout=wait_s)
            except Empty:
                if self._inbox.cause is not None:
                    raise _Ended(self._inbox.cause) from None
                if time.monotonic() - heard_s > self._stall_s:
                    text = f"it sent nothing for {self._stall_s:g} s"
                    raise _Ended(text) from None
                continue
            if item is None:
                continue
            if item.number != number:
                continue  # about an earlier file
            heard_s = time.monotonic()
            if not isinstance(item, messages.Working):
                return item


def _decoded(answer: messages.ResultsMessage) -> bytes:
    with suppress(ValueError):
        if isinstance(answer, messages.Piece):
            data = base64.b64decode(answer.data, validate=True)
            if data:
                return data
    raise _Ended(_VIOLATED)


def run_all(transfers: Sequence[HostTransfer], at_once: int) -> None:
    """Run transfers from several hosts, at most ``at_once`` at a time."""
    waiting: SimpleQueue[HostTransfer] = SimpleQueue()
    for transfer in transfers:
        waiting.put(transfer)

    def work() -> None:
        with suppress(Empty):
            while True:
                waiting.get_nowait().run()

    threads = [
        threading.Thread(target=work, name=f"results {index}", daemon=True)
        for index in range(min(at_once, len(transfers)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
