"""Starts, enters and ends sets of namespaces. Knows no daemon and no network."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.rigs.testbed.commands import (
    RigError,
    Unavailable,
    children,
    last_lines,
    run,
    wait_until,
)
from tests.rigs.testbed.processes import last_of, wake

_INIT = Path(__file__).with_name("init.py")
_READY_S = 20.0
_GONE_S = 20.0

_APART = ("--mount", "--uts", "--ipc", "--net", "--pid")


@dataclass(frozen=True, slots=True)
class Mask:
    """An empty folder mounted over ``target``; the paths in ``keep`` stay visible."""

    target: str
    keep: tuple[str, ...] = ()
    mode: str = "0755"


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder to create after the mounts; ``owner`` is both the user and group id."""

    path: str
    mode: int = 0o755
    owner: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What process 1 sets up before it reports that it is ready, in this order."""

    hostname: str
    binds: tuple[tuple[str, str], ...] = ()
    """Pairs of source and target."""
    masks: tuple[Mask, ...] = ()
    folders: tuple[Folder, ...] = ()
    leased: bool = False
    """Whether all processes end at the end of standard input."""


@dataclass(frozen=True, slots=True)
class Namespaces:
    """A running set of namespaces, identified by its process 1."""

    pid: int
    """The pid in this machine's PID namespace."""
    start_ticks: int
    """Start time of the process; a reused pid has another one."""

    @property
    def alive(self) -> bool:
        return start_ticks(self.pid) == self.start_ticks

    @property
    def ending(self) -> bool:
        """Whether process 1 has ended but other processes have not yet."""
        try:
            return self.alive and not Path(f"/proc/{self.pid}/cmdline").read_bytes()
        except OSError:
            return False

    def enter(self, *argv: str) -> tuple[str, ...]:
        """The argv that runs ``argv`` inside."""
        return ("nsenter", f"--target={self.pid}", *_APART, "--", *argv)

    def enter_network(self, *argv: str) -> tuple[str, ...]:
        """The argv that runs ``argv`` inside the network namespace only."""
        return ("nsenter", f"--target={self.pid}", "--net", "--", *argv)

    def end(self, *nested: Namespaces) -> None:
        """Kill every process inside and wait until the kernel has removed them.

        The kernel also waits for ``nsenter`` processes. They stop when their program
        is stopped, so those into these and the ``nested`` namespaces are continued.
        """
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

        def gone() -> bool:
            if not self.alive:
                return True
            wake({f"--target={each.pid}" for each in (self, *nested)})
            return False

        try:
            wait_until(gone, f"end of process {self.pid}", _GONE_S)
        except RigError as error:
            raise RigError("\n".join((str(error), *last_of(self.pid)))) from None


Where = Callable[[], Namespaces]
"""Returns a host's current namespaces; raises RigError while it has no power."""


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it has ended."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = line[line.rindex(")") + 1 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def check_possible() -> None:
    """Raises Unavailable if the kernel or a container forbids namespaces."""
    done = run(("unshare", *_APART, "--fork", "--", "true"))
    if done.returncode:
        raise Unavailable(f"no namespaces can be made here: {done.stderr.strip()}")


def start(
    setup: Setup, *, within: Namespaces | None, log: Path
) -> tuple[Namespaces, subprocess.Popen[bytes]]:
    """Start a set of namespaces, nested in another or on its own.

    If it is leased, the ``stdin`` of the returned process is the lease. The caller
    waits for that process at the end. Raises RigError with the log's last lines.
    """
    unshare = ("unshare", *_APART, "--fork", "--propagation=private")
    python = (sys.executable, "-I", "-S", str(_INIT), json.dumps(asdict(setup)))
    argv = (*unshare, *python)
    with log.open("ab") as errors:
        process = subprocess.Popen(
            within.enter(*argv) if within else argv,
            stdin=subprocess.PIPE if setup.leased else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    if not _says_ready(process):
        for each in (*_chain(process.pid), process.pid):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        _release(process)
        raise RigError(f"{setup.hostname} did not start:\n{last_lines(log)}")
    first = _chain(process.pid)[-1]
    ticks = start_ticks(first)
    if ticks is None:
        raise RigError(f"{setup.hostname} ended at once:\n{last_lines(log)}")
    return Namespaces(first, ticks), process


def _says_ready(process: subprocess.Popen[bytes]) -> bool:
    assert process.stdout is not None
    with process.stdout as pipe:
        deadline = time.monotonic() + _READY_S
        while (left := deadline - time.monotonic()) > 0:
            if select.select([pipe], [], [], left)[0]:
                return os.read(pipe.fileno(), 16) == b"ready\n"
    return False


def _chain(pid: int) -> Sequence[int]:
    """The descendants of ``pid``, down to process 1. Each has one child."""
    found: list[int] = []
    while below := children(pid):
        pid = below[0]
        found.append(pid)
    return found


def _release(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    process.wait(_GONE_S)
