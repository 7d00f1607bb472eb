"""What runs inside a PID namespace, as this machine sees it: look, stop, let go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """A process; its pid is as this machine counts."""

    pid: int
    inside_pid: int
    parent: int
    """As this machine counts: it may be what leads inside."""
    user: int
    argv: tuple[str, ...]
    environ: frozenset[str]
    """``NAME=value``, as it was started with."""


def processes(first: int, marker: str | None = None) -> list[Process]:
    """All that live in the PID namespace of process ``first``, without that one.

    ``marker`` is ``NAME=value``, or a name alone: only those that carry it. What has
    ended and was not yet waited for does not count.
    """
    wanted = _namespace(first)
    found = (
        process
        for pid in _pids()
        if pid != first and wanted and _namespace(pid) == wanted
        for process in _read(pid)
    )
    return [each for each in found if _carries(each.environ, marker)]


def last_of(first: int) -> list[str]:
    """What an ended process 1 waits for, a line each, also what has ended itself.

    The namespace of what has ended cannot be read, so it is found by its pids: more of
    them than we have ourselves.
    """
    found = []
    own = _status(Path("/proc/self"))["NSpid"].split()
    for pid in _pids():
        with suppress(OSError):
            status = _status(_PROC / str(pid))
            if pid != first and len(status["NSpid"].split()) > len(own):
                words = " ".join(_words(_PROC / str(pid) / "cmdline"))
                name, state = status["Name"].strip(), status["State"].strip()
                parent = status["PPid"].strip()
                found.append(f"{pid} {name}, {state}, child of {parent}: {words[:200]}")
    return found


def freeze(first: int) -> None:
    """Stop them all, as a host that swaps does; its kernel still answers."""
    stopped: set[int] = set()
    while running := {p.pid for p in processes(first)} - stopped:
        for pid in running:
            _signal(pid, signal.SIGSTOP)
        stopped |= running


def thaw(first: int) -> None:
    """Let them go on, and the ways in, which stop with what they lead to."""
    for process in processes(first):
        for pid in (process.pid, process.parent):
            _signal(pid, signal.SIGCONT)


def wake(ways_in: set[str]) -> None:
    """Let every ``nsenter`` with one of these arguments go on."""
    for pid in _pids():
        with suppress(OSError):
            words = _words(_PROC / str(pid) / "cmdline")
            if words[:1] == ("nsenter",) and ways_in.intersection(words):
                _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _carries(environ: frozenset[str], marker: str | None) -> bool:
    if marker is None or marker in environ:
        return True
    return "=" not in marker and any(e.startswith(f"{marker}=") for e in environ)


def _pids() -> Iterator[int]:
    return (int(path.name) for path in _PROC.iterdir() if path.name.isdecimal())


def _namespace(pid: int) -> str | None:
    with suppress(OSError):
        return os.readlink(_PROC / str(pid) / "ns" / "pid")  # noqa: PTH115 - not a path
    return None


def _read(pid: int) -> Iterator[Process]:
    """One or none: it may end while it is looked at."""
    folder = _PROC / str(pid)
    with suppress(OSError):
        status = _status(folder)
        if status["State"].split()[0] in "ZX":
            return
        yield Process(
            pid=pid,
            inside_pid=int(status["NSpid"].split()[-1]),
            parent=int(status["PPid"]),
            user=int(status["Uid"].split()[0]),
            argv=_words(folder / "cmdline"),
            environ=frozenset(_words(folder / "environ")),
        )


def _status(folder: Path) -> dict[str, str]:
    lines = (folder / "status").read_text().splitlines()
    return {key: value for key, _, value in (line.partition(":") for line in lines)}


def _words(path: Path) -> tuple[str, ...]:
    return tuple(os.fsdecode(word) for word in path.read_bytes().split(b"\0")[:-1])
