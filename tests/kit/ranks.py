"""Ranks for tests: as threads of one process, or as processes with TensorFlow."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tests.kit.baselines import Baselines, digest_of
from tfcluster.runtime.collective import Group
from tfcluster.runtime.collective.transports.hierarchical import HostTransport
from tfcluster.runtime.net.rendezvous import Member
from tfcluster.runtime.signals import SHARED, Signals

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "runtime" / "programs"
TOKEN = bytes(range(32))
DEADLINE_S = 180.0

T = TypeVar("T")


@contextmanager
def held_addresses(count: int) -> Iterator[list[str]]:
    """Ports of this machine that are bound but not listened on, as an agent does."""
    with ExitStack() as held:
        addresses = []
        for _ in range(count):
            holder = held.enter_context(socket.socket())
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind(("127.0.0.1", 0))
            addresses.append(f"127.0.0.1:{holder.getsockname()[1]}")
        yield addresses


@contextmanager
def installed_signals() -> Iterator[Signals]:
    """Handlers of signals as a task has them; afterwards all are as before."""
    before = {number: signal.getsignal(number) for number in SHARED}
    functions = signal.signal, signal.getsignal
    installed = Signals()
    installed.install()
    try:
        yield installed
    finally:
        signal.signal, signal.getsignal = functions
        # A thread may still send one of them to this process.
        for number in SHARED:
            signal.signal(number, signal.SIG_IGN)
        for number, handler in before.items():
            signal.signal(number, handler)


def as_threads(
    size: int, act: Callable[[Group], T], host_keys: Sequence[str] | None = None
) -> list[T | BaseException]:
    """What ``act`` returned or raised on each rank of a group over real sockets.

    Ranks of the same host key share memory; without ``host_keys`` all ranks do.
    """

    def run(rank: int) -> T:
        member = Member(rank, size, TOKEN)
        transport = HostTransport(
            member,
            addresses,
            timeout_s=10.0,
            host_key=host_keys[rank] if host_keys else None,
        )
        group = Group(transport)
        try:
            return act(group)
        finally:
            group.close()

    with held_addresses(size) as addresses:
        return in_threads([partial(run, rank) for rank in range(size)])


def in_threads(acts: Sequence[Callable[[], T]]) -> list[T | BaseException]:
    """Run functions at the same time; what each of them returned or raised."""
    outcomes: list[Any] = [AssertionError("it did not end in time")] * len(acts)

    def run(index: int) -> None:
        try:
            outcomes[index] = acts[index]()
        except BaseException as error:
            outcomes[index] = error

    threads = [
        threading.Thread(target=run, args=(index,), daemon=True)
        for index in range(len(acts))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    return outcomes


def results(outcomes: Sequence[T | BaseException]) -> list[T]:
    """The outcomes. Raises the first that is an exception."""
    found = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        found.append(outcome)
    return found


@dataclass(frozen=True)
class Job:
    """A script that ``size`` ranks run together; one rank runs it without hooks."""

    name: str
    size: int
    script: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    servers: int = 0
    keep: bool = False
    """Whether the result is cached between test runs (one rank only; ``Baselines``)."""


@dataclass(frozen=True)
class Ranks:
    """The results of a job, by rank."""

    exit_codes: list[int]
    outputs: list[str]
    folder: Path


class ForkServer:
    """A connection to ``fork_ranks.py``, which has imported TensorFlow and forks ranks.

    All test processes share one server: the first that needs it starts it, and it ends
    with its last connection.
    """

    def __init__(self, folder: Path) -> None:
        pid = b""
        while not pid:  # A server that is about to end sends none.
            self._channel = _connected(folder)
            self._channel.settimeout(DEADLINE_S)
            self._answers = self._channel.makefile("rb")
            with suppress(ConnectionResetError):
                pid = self._answers.readline()
        self._pid = int(pid)

    def run(self, folder: Path, job: Job, timeout_s: float) -> Ranks:
        """Run a job to its end.

        Raises ``AssertionError`` with the output and the stacks of all ranks if they
        have not ended after the timeout.
        """
        described = (
            job.name,
            job.size,
            str(PROGRAMS / job.script),
            job.args,
            dict(job.env),
            job.servers,
        )
        request = json.dumps([str(folder), timeout_s, described]).encode() + b"\n"
        self._channel.settimeout(timeout_s + DEADLINE_S)
        try:
            self._channel.sendall(request)
            answer = self._answers.readline()
        except BaseException:
            self.kill()
            raise
        if not answer:
            self.kill()
            raise AssertionError(f"fork_ranks.py has ended in {job.name}")
        left = _left_behind(folder / job.name, job.size)
        if answer != b"ended\n":
            said = [f"rank {i}:\n{output}" for i, output in enumerate(left.outputs)]
            raise AssertionError(
                "\n".join([f"{job.name} ran for {timeout_s:g} s", *said])
            )
        return left

    @property
    def alive(self) -> bool:
        return self._channel.fileno() >= 0

    def end(self) -> None:
        self._answers.close()
        self._channel.close()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)  # Includes the ranks.
        self.end()


def _connected(folder: Path) -> socket.socket:
    """Connect to the server whose socket is in a folder; start it if needed."""
    path = folder / "ranks"
    with (folder / "ranks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        channel = socket.socket(socket.AF_UNIX)
        with suppress(FileNotFoundError, ConnectionRefusedError):
            channel.connect(str(path))
            return channel
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen()
            _start(listening.fileno())
        channel.connect(str(path))
        return channel


def _start(descriptor: int) -> None:
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TF_", "TFCLUSTER_")) or name == "TFCLUSTER_PARTITION"
    }
    env |= {
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # Several ranks share few cores: more threads would only compete for them.
        "TF_NUM_INTRAOP_THREADS": "1",
    }
    if os.environ.get("TFCLUSTER_TEST_GPU") == "1":
        env |= {
            "TFCLUSTER_TEST_GPU": "1",
            # The ranks share its memory.
            "TF_FORCE_GPU_ALLOW_GROWTH": "true",
            # Else products have eleven bits, and shapes decide on their rounding.
            "NVIDIA_TF32_OVERRIDE": "0",
        }
    started = subprocess.Popen(
        [sys.executable, str(PROGRAMS / "fork_ranks.py"), str(descriptor)],
        env=env,
        stdin=subprocess.DEVNULL,
        pass_fds=[descriptor],
        start_new_session=True,
    )
    # It ends with its connections; without this, Popen would warn that it still runs.
    started.returncode = 0


_fork_servers: list[ForkServer] = []
"""The connection of this process; empty until a job has run."""
_server_folder: list[Path] = []


def share_fork_server_in(folder: Path) -> None:
    _server_folder[:] = [folder]


def _fork_server() -> ForkServer:
    if _fork_servers and not _fork_servers[0].alive:
        _fork_servers.clear()
    if not _fork_servers:
        _fork_servers.append(ForkServer(_server_folder[0]))
    return _fork_servers[0]


def end_fork_server() -> None:
    while _fork_servers:
        _fork_servers.pop().end()


_baselines: Baselines | None = None


def keep_baselines_in(folder: Path | None) -> None:
    global _baselines
    _baselines = Baselines(folder) if folder else None


def _digest_of(job: Job, folder: Path) -> str:
    words = [job.script, *job.args]
    plain = [word.replace(str(folder), "").replace(str(ROOT), "") for word in words]
    sources = [*PROGRAMS.rglob("*.py"), PROGRAMS / job.script]
    sources += [Path(word) for word in job.args if word.endswith(".py")]
    return digest_of(plain, dict(job.env), sources)


class Jobs(Mapping[str, Ranks]):
    """The results of jobs by name; each job runs when its results are first read.

    ``timeout_s`` applies to each job. With ``must_succeed``, reading the results of a
    job that failed raises.
    """

    def __init__(
        self,
        folder: Path,
        jobs: Sequence[Job],
        timeout_s: float,
        *,
        must_succeed: bool = False,
    ) -> None:
        self._folder = folder
        self._jobs = {job.name: job for job in jobs}
        self._timeout_s = timeout_s
        self._must_succeed = must_succeed
        self._ended: dict[str, Ranks] = {}
        self._failed: dict[str, BaseException] = {}

    def __getitem__(self, name: str) -> Ranks:
        if name in self._failed:
            # Do not run it again: it may have taken all of its time.
            raise AssertionError(f"{name} has not ended") from self._failed[name]
        if name not in self._ended:
            try:
                self._ended[name] = self._run(self._jobs[name])
            except BaseException as error:
                self._failed[name] = error
                raise
        ended = self._ended[name]
        if self._must_succeed:
            assert set(ended.exit_codes) == {0}, (name, ended.outputs)
        return ended

    def _run(self, job: Job) -> Ranks:
        if not job.keep or _baselines is None:
            return _fork_server().run(self._folder, job, self._timeout_s)
        digest = _digest_of(job, self._folder)
        with _baselines.locked(digest):
            if _baselines.restore(digest, self._folder):
                return _left_behind(self._folder / job.name, job.size)
            ended = _fork_server().run(self._folder, job, self._timeout_s)
            if not any(ended.exit_codes):
                written = [job.name, f"{job.name}-0.npz"]
                _baselines.keep(digest, self._folder, written)
            return ended

    def __iter__(self) -> Iterator[str]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)


def run_jobs(folder: Path, jobs: Sequence[Job], timeout_s: float) -> dict[str, Ranks]:
    """Run jobs one after the other; the timeout is for all of them together."""
    deadline_s = time.monotonic() + timeout_s
    return {
        job.name: _fork_server().run(
            folder, job, max(deadline_s - time.monotonic(), 0.0)
        )
        for job in jobs
    }


def _left_behind(folder: Path, size: int) -> Ranks:
    return Ranks(
        [int((folder / f"{rank}.exit").read_text()) for rank in range(size)],
        [(folder / f"{rank}.out").read_text() for rank in range(size)],
        folder / "work",
    )
