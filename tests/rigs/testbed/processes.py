"""Lists, stops and continues the processes of a PID namespace from outside."""

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
    """A process inside; ``pid`` is in this machine's PID namespace."""

    pid: int
    inside_pid: int
    parent: int
    """In this machine's PID namespace; it may be ``nsenter``, outside."""
    user: int
    argv: tuple[str, ...]
    environ: frozenset[str]
    """Its initial environment, as ``NAME=value``."""


def processes(first: int, marker: str | None = None) -> list[Process]:
    """All processes in the PID namespace of process ``first``, except ``first``.

    With ``marker``, which is ``NAME=value`` or a name alone, only processes with this
    variable. Zombies are left out.
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
    """A line for each process that an ended process 1 waits for, zombies included.

    The namespace of a zombie cannot be read, so processes inside are recognized by
    having more pids than this process.
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
    """Stop all processes, as on a host that swaps; the kernel still answers."""
    stopped: set[int] = set()
    while running := {p.pid for p in processes(first)} - stopped:
        for pid in running:
            _signal(pid, signal.SIGSTOP)
        stopped |= running


def thaw(first: int) -> None:
    """Continue all processes, and their parents: ``nsenter`` stops with its program."""
    for process in processes(first):
        for pid in (process.pid, process.parent):
            _signal(pid, signal.SIGCONT)


def wake(ways_in: set[str]) -> None:
    """Continue every ``nsenter`` with one of these arguments."""
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
    """Yield the process, or nothing if it ends meanwhile."""
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
