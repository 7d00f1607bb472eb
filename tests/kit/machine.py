"""Inspects processes, sockets and locks on this machine, with or without root."""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest

from tests.kit.waiting import eventually

_POLL_S = 0.01
_PTRACE_ATTACH, _PTRACE_DETACH = 16, 17


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208 - names suffice


def cmdline(pid: int) -> list[str]:
    """Return the command line; empty for a process that is gone, or a zombie."""
    with suppress(OSError):
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
        return [os.fsdecode(word) for word in data.split(b"\0")[:-1]]
    return []


def title(pid: int) -> str:
    """Return what ``ps`` shows for a process that has set its own title."""
    return next(iter(cmdline(pid)), "")


def is_agent(pid: int) -> bool:
    return title(pid).startswith("tfcluster: agent")


def environ(pid: int) -> set[bytes]:
    """Return the ``NAME=value`` entries that a process was started with."""
    with suppress(OSError):
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    return set()


def carrying(mark: str) -> list[int]:
    """Return the processes that were started with ``NAME=value`` in the environment."""
    wanted = mark.encode()
    return [pid for pid in pids() if wanted in environ(pid)]


def parent(pid: int) -> int | None:
    with suppress(OSError):
        line = Path(f"/proc/{pid}/stat").read_bytes()
        return int(line[line.rindex(b")") + 1 :].split()[1])
    return None


def is_alive(pid: int) -> bool:
    """Whether the process runs or is stopped; a zombie is not alive."""
    return _state(pid) not in (b"", b"Z", b"X")


def is_stopped(pid: int) -> bool:
    return _state(pid) == b"T"


def _state(pid: int) -> bytes:
    with suppress(OSError):
        line = Path(f"/proc/{pid}/stat").read_bytes()
        return line[line.rindex(b")") + 1 :].split()[0]
    return b""


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Freeze a child of ours: no signal but KILL has an effect on it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(_PTRACE_ATTACH, pid, None, None) != 0:
        pytest.skip(f"ptrace: {os.strerror(ctypes.get_errno())}")
    os.waitpid(pid, os.WUNTRACED)
    try:
        yield
    finally:
        libc.ptrace(_PTRACE_DETACH, pid, None, None)  # fails if it was killed


def few_files(folder: Path, count: int) -> AbstractContextManager[None]:
    """Mount a tmpfs that holds at most ``count`` files at ``folder``. Needs root."""
    return _in_memory(folder, f"nr_inodes={count},mode=700")


@contextmanager
def nearly_full(folder: Path, free_pages: int) -> Iterator[None]:
    """Mount a tmpfs with ``free_pages`` free pages at ``folder``. Needs root."""
    page = os.sysconf("SC_PAGESIZE")
    with _in_memory(folder, f"size={16 * page},mode=700"):
        (folder / "filler").write_bytes(bytes((16 - free_pages) * page))
        yield


@contextmanager
def _in_memory(folder: Path, options: str) -> Iterator[None]:
    folder.mkdir(mode=0o700, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def children(pid: int) -> list[int]:
    return [child for child in pids() if parent(child) == pid]


def agent_of(launcher: int) -> tuple[int, int]:
    """Return the pids of the guard and the agent that a launcher has started."""
    found: list[int] = []

    def look() -> bool:
        found[:] = []
        for guard in children(launcher):
            if title(guard) == "tfcluster: guard":
                agents = [p for p in children(guard) if is_agent(p)]
                found.extend([guard, *agents[:1]])
        return len(found) == 2

    eventually(look, lambda: f"{launcher} has no agent: {found}", 40)
    return found[0], found[1]


def listening_ports() -> Iterator[int]:
    """Yield the TCP ports that have a listener, over IPv4 or IPv6."""
    for name in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    yield int(fields[1].rpartition(":")[2], 16)


def is_locked(path: Path) -> bool:
    """Whether some process holds the lock; False if the file does not exist."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def peak_memory_kib(pid: int) -> int:
    """Return the peak resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    raise AssertionError(f"{pid} has no memory")
