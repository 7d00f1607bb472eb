"""Ranks for tests: as threads of one process, or as processes with TensorFlow."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tfcluster.runtime.collective import Group
from tfcluster.runtime.collective.handshake import Member
from tfcluster.runtime.collective.host import HostTransport

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent / "programs"
TOKEN = bytes(range(32))
DEADLINE_S = 60.0

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


def as_threads(
    size: int, act: Callable[[Group], T], places: Sequence[str] | None = None
) -> list[T | BaseException]:
    """What ``act`` returned, or raised, on each rank of a group over real sockets.

    Ranks of the same place share memory; without ``places`` all do.
    """

    def run(rank: int) -> T:
        member = Member(rank, size, TOKEN)
        transport = HostTransport(
            member,
            addresses,
            join_timeout_s=10.0,
            stall_timeout_s=10.0,
            place=places[rank] if places else None,
        )
        group = Group(transport)
        try:
            return act(group)
        finally:
            group.close()

    with held_addresses(size) as addresses:
        return in_threads([partial(run, rank) for rank in range(size)])


def in_threads(acts: Sequence[Callable[[], T]]) -> list[T | BaseException]:
    """The outcomes of functions that run at the same time."""
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
    """The outcomes, none of which may be an exception."""
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


@dataclass(frozen=True)
class Ranks:
    """What a job has left behind, by rank."""

    exit_codes: list[int]
    outputs: list[str]
    folder: Path


def run_jobs(folder: Path, jobs: Sequence[Job], timeout_s: float) -> dict[str, Ranks]:
    """Run jobs one after the other, with TensorFlow imported once for all of them."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TF_", "TFCLUSTER_"))
    }
    env |= {
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # Several ranks on few cores: threads would only be in each other's way.
        "TF_NUM_INTRAOP_THREADS": "1",
    }
    described = [
        [
            job.name,
            job.size,
            str(PROGRAMS / job.script),
            job.args,
            dict(job.env),
            job.servers,
        ]
        for job in jobs
    ]
    command = [sys.executable, str(PROGRAMS / "fork_ranks.py"), str(folder)]
    with subprocess.Popen(
        [*command, json.dumps(described)],
        env=env,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    ) as forker:
        try:
            code = forker.wait(timeout_s)
        except BaseException:
            os.killpg(forker.pid, signal.SIGKILL)  # The ranks, too.
            raise
    assert code == 0, f"fork_ranks.py ended with {code}"
    return {job.name: _left_behind(folder / job.name, job.size) for job in jobs}


def _left_behind(folder: Path, size: int) -> Ranks:
    return Ranks(
        [int((folder / f"{rank}.exit").read_text()) for rank in range(size)],
        [(folder / f"{rank}.out").read_text() for rank in range(size)],
        folder / "work",
    )
