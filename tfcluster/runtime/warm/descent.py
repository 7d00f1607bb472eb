"""Creates the processes of a run from a kept interpreter: a guard, an agent, servers.

A server is a fork of the interpreter that forks tasks. It has to be a child of the
run's agent, so the agent's process is forked here as well, forks the servers, and only
then executes the agent. ``docs/protocols.md`` ("Kept interpreters") has a picture.
Knows how a process takes over another one's state, but not what agents do.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from tfcluster.runtime.warm.fork import default_signals, fork

MARKS = "TFCLUSTER_KEPT"
"""The variable that the marks of a run replace in its servers."""
MARKS_BYTES = 400

_ENV_START, _ENV_END = 49, 50
"""Fields of /proc/self/stat, counted from 0."""
_START_TIME = 21
_FAILED = 70


@dataclass(frozen=True, slots=True, kw_only=True)
class DescentRequest:
    """The state that the run's processes must have; tasks inherit all of it."""

    run: str
    count: int
    guard_argv: Sequence[str]
    agent_argv: Sequence[str]
    env: Mapping[str, str]
    umask: int
    limits: Mapping[str, Sequence[int]]
    """The soft and hard limit, by the number of the resource limit."""
    nice: int
    oom_score_adj: int
    ignored: Sequence[int]
    """Signals that stay ignored."""
    blocked: Sequence[int]
    """Signals that are blocked in guard and agent until they have handlers."""
    streams: Sequence[int]
    """Descriptors that become the standard streams."""
    link: int
    """Descriptor of the socket to the process that made the request."""

    @classmethod
    def parse(cls, frame: Mapping[str, Any], fds: Sequence[int]) -> DescentRequest:
        """Parse a request. Raises ValueError if something is missing or wrong."""
        if len(fds) != 4:
            raise ValueError(f"a request needs 4 descriptors, got {len(fds)}")
        try:
            request = cls(
                run=str(frame["run"]),
                count=int(frame["count"]),
                guard_argv=[str(word) for word in frame["guard_argv"]],
                agent_argv=[str(word) for word in frame["agent_argv"]],
                env={str(k): str(v) for k, v in frame["env"].items()},
                umask=int(frame["umask"]),
                limits={
                    str(k): [int(n) for n in v] for k, v in frame["limits"].items()
                },
                nice=int(frame["nice"]),
                oom_score_adj=int(frame["oom_score_adj"]),
                ignored=[int(number) for number in frame["ignored"]],
                blocked=[int(number) for number in frame["blocked"]],
                streams=fds[:3],
                link=fds[3],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"an incomplete request: {error!r}") from error
        if len(_marks(request.run, "0:0")) > MARKS_BYTES // 2:
            raise ValueError("the name of the run is too long")
        return request


def descend(request: DescentRequest) -> socket.socket | None:
    """Fork the run's processes. Returns None here, and its socket in a server.

    The guard becomes a child of this process, which need not wait for it. Raises
    OSError if nothing can be forked.
    """
    if fork():
        return None
    try:
        return _in_guard(request)
    except BaseException as error:
        with suppress(OSError):
            os.write(
                2, f"tfcluster: cannot leave the kept interpreter: {error}\n".encode()
            )
        os._exit(_FAILED)


def _in_guard(request: DescentRequest) -> socket.socket:
    link = _take_descriptors(request)
    os.setsid()
    _become_alike(request)
    ours, theirs = socket.socketpair()
    guard = os.getpid()
    agent = fork()
    if agent == 0:
        ours.close()
        return _in_agent(request, link, theirs, guard)
    theirs.close()
    words = (str(agent), str(link), str(ours.fileno()))
    return _execute(request, [*request.guard_argv, *words], keep=(link, ours.fileno()))


def _in_agent(
    request: DescentRequest, link: int, to_guard: socket.socket, guard: int
) -> socket.socket:
    os.setsid()
    servers: list[tuple[int, socket.socket]] = []
    for _ in range(request.count):
        ours, theirs = socket.socketpair()
        pid = fork()
        if pid == 0:
            # All descriptors are closed at once; their numbers will be reused.
            for end in (ours, to_guard, *(end for _, end in servers)):
                end.detach()
            return _in_server(request, theirs.detach())
        theirs.close()
        servers.append((pid, ours))
    keep = (link, to_guard.fileno(), *(end.fileno() for _, end in servers))
    words = [str(guard), *map(str, keep[:2])]
    words += [f"{pid}:{end.fileno()}" for pid, end in servers]
    return _execute(request, [*request.agent_argv, *words], keep=keep)


def _in_server(request: DescentRequest, end: int) -> socket.socket:
    os.setsid()
    agent = os.getppid()
    _write_marks(_marks(request.run, f"{agent}:{start_time(agent)}"))
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.closerange(3, end)
    os.closerange(end + 1, os.sysconf("SC_OPEN_MAX"))
    return socket.socket(fileno=end)


def _take_descriptors(request: DescentRequest) -> int:
    """Keep only the standard streams and the link; return the link's number."""
    high = [os.dup(fd) for fd in (*request.streams, request.link)]
    # Some of the given numbers may be overwritten next.
    base = max(*high, 10) + 1
    lifted = [os.dup2(fd, base + index) for index, fd in enumerate(high)]
    for stream, fd in enumerate(lifted[:3]):
        os.dup2(fd, stream)
    os.dup2(lifted[3], 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    return 3


def _become_alike(request: DescentRequest) -> None:
    os.chdir("/")
    os.umask(request.umask)
    default_signals(frozenset())
    for number in request.ignored:
        signal.signal(number, signal.SIG_IGN)
    for limit, (soft, hard) in request.limits.items():
        resource.setrlimit(int(limit), (soft, hard))
    os.setpriority(os.PRIO_PROCESS, 0, request.nice)
    with open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123 - as elsewhere
        file.write(str(request.oom_score_adj))


def _execute(
    request: DescentRequest, argv: Sequence[str], keep: Sequence[int]
) -> NoReturn:
    for fd in keep:
        os.set_inheritable(fd, True)
    # Python ignores these signals; a program that it executes must not inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, request.blocked)
    os.execve(argv[0], list(argv), request.env)


def _marks(run: str, agent: str) -> bytes:
    marks = (f"TFCLUSTER_RUN={run}", f"TFCLUSTER_AGENT={agent}")
    return b"".join(os.fsencode(mark) + b"\0" for mark in marks)


def start_time(pid: int) -> int:
    """When a process was started, in ticks since boot. Raises OSError if it is gone."""
    return int(_stat_fields(str(pid))[_START_TIME])


def _stat_fields(pid: str) -> list[bytes]:
    with open(f"/proc/{pid}/stat", "rb") as stat:  # noqa: PTH123 - as elsewhere
        head, _, tail = stat.read().rpartition(b")")
    return [head, b"", *tail.split()]


def require_room() -> None:
    """Raise OSError if servers of this interpreter could not be given their marks."""
    _write_marks(f"{MARKS}=".encode().ljust(MARKS_BYTES, b"x"))


def _write_marks(marks: bytes) -> None:
    """Write the marks into the environment that /proc shows for this process.

    The kernel reads it from the process's own memory (proc(5): /proc/pid/environ,
    /proc/pid/mem). The interpreter was started with a variable that leaves room there.
    """
    fields = _stat_fields("self")
    start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    memory = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        environ = os.pread(memory, end - start, start)
        at = environ.find(f"{MARKS}=".encode())
        length = environ.find(b"\0", at) - at
        if at < 0 or length < len(marks):
            raise OSError("there is no room for the marks of the run")
        os.pwrite(memory, marks.ljust(length, b"\0"), start + at)
    finally:
        os.close(memory)
