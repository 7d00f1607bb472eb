"""Reads processes, their parents and environments from /proc.

Formats as in proc(5). The parsers are pure; the readers return nothing for a process
that is gone or that we may not inspect. Sends no signals.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Collection, Mapping
from contextlib import suppress

from tfcluster.base.light_dataclasses import dataclass

PROC = "/proc"
OPEN_FILES = 8192
"""The number of files that an agent opens at most."""
_PART_BYTES = 1 << 17
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MARKS = b"TFCLUSTER_"
_CAUGHT = re.compile(rb"^SigCgt:\s*([0-9a-f]+)$", re.MULTILINE)
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError, NotADirectoryError)


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """A process. The pair of pid and start time (ticks since boot) is unique."""

    pid: int
    name: str
    state: str
    ppid: int
    group: int
    session: int
    start_time: int
    rss_bytes: int = 0  # resident memory, pages that it shares with others included
    cpu_s: float = 0.0  # since its start, its children that were waited for included

    @property
    def dead(self) -> bool:
        return self.state in "ZXx"


Table = Mapping[int, ProcessEntry]


def parse_stat(text: bytes) -> ProcessEntry:
    """Parse /proc/PID/stat; the name may hold spaces, newlines and parentheses."""
    head, _, tail = text.rpartition(b")")
    pid, _, name = head.partition(b" (")
    fields = tail.split()
    return ProcessEntry(
        pid=int(pid),
        name=name.decode("utf-8", "backslashreplace"),
        state=fields[0].decode("ascii"),
        ppid=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        start_time=int(fields[19]),
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
        cpu_s=sum(map(int, fields[11:15])) / _TICKS_PER_S,
    )


def parse_environ(data: bytes) -> dict[str, str]:
    """Parse /proc/PID/environ; a process may have written anything there."""
    pairs = (entry.partition(b"=") for entry in data.split(b"\0") if entry)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def family(
    table: Table, roots: Collection[int], sessions: Collection[int] = ()
) -> set[int]:
    """The roots, the members of the sessions, and the descendants of all of these."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.ppid, []).append(process.pid)
    members: set[int] = set()
    todo = [pid for pid in roots if pid in table]
    todo += [p.pid for p in table.values() if p.session in sessions]
    while todo:
        pid = todo.pop()
        if pid not in members:
            members.add(pid)
            todo += children.get(pid, ())
    return members


def ancestors(table: Table, pid: int) -> set[int]:
    members: set[int] = set()
    while pid in table and pid not in members:
        members.add(pid)
        pid = table[pid].ppid
    return members


def text_or_empty(path: str) -> str:
    """The content of a small kernel file; empty if it cannot be read."""
    try:
        return _bytes_of(path).decode("utf-8", "surrogateescape")
    except OSError:
        return ""


def _bytes_of(path: str) -> bytes:
    # Without the calls of a file object, which are half the cost of a snapshot.
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = b""
        while part := os.read(file, _PART_BYTES):
            data += part
        return data
    finally:
        os.close(file)


def read(pid: int) -> ProcessEntry | None:
    """The state of a process, perhaps a zombie; None if there is no such process."""
    try:
        return parse_stat(_bytes_of(f"{PROC}/{pid}/stat"))
    except _GONE:
        return None


def catches(pid: int, signum: int) -> bool:
    with suppress(*_GONE):
        match = _CAUGHT.search(_bytes_of(f"{PROC}/{pid}/status"))
        return match is not None and bool(int(match[1], 16) >> (signum - 1) & 1)
    return False


def snapshot() -> dict[int, ProcessEntry]:
    """All visible processes, by pid."""
    table: dict[int, ProcessEntry] = {}
    for name in os.listdir(PROC):
        if name.isdecimal() and (process := read(int(name))) is not None:
            table[process.pid] = process
    return table


def uid_of(pid: int) -> int | None:
    try:
        return os.stat(f"{PROC}/{pid}").st_uid
    except _GONE:
        return None


def environ(pid: int) -> dict[str, str]:
    """The initial environment of a process, if tfcluster's marks are in it, else {}."""
    try:
        data = _bytes_of(f"{PROC}/{pid}/environ")
    except _GONE:
        return {}
    return parse_environ(data) if _MARKS in data else {}


def descriptors(pid: int) -> dict[int, str]:
    """A process's descriptors and their targets: ``socket:[INODE]`` or a path."""
    targets: dict[int, str] = {}
    with suppress(*_GONE):
        for entry in os.scandir(f"{PROC}/{pid}/fd"):
            with suppress(*_GONE):
                targets[int(entry.name)] = os.readlink(entry.path)
    return targets


def network() -> str:
    """An identifier of the network namespace on this machine; empty if unknown."""
    try:
        return os.readlink(f"{PROC}/self/ns/net")
    except OSError:
        return ""


def boot_id() -> str:
    """An identifier of this boot of the machine; empty if unknown."""
    return text_or_empty(f"{PROC}/sys/kernel/random/boot_id").strip()


def allow_open_files(count: int) -> None:
    """Raise the soft limit to ``count``, as far as the hard limit allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
