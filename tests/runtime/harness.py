"""Does an agent's work for a task in tests: sockets, forks, output, exit status."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfcluster.base.isolated_import import module_argv

DEADLINE_S = 120.0


def told(text: str, name: str) -> list[dict[str, Any]]:
    """The JSON objects that a program printed after ``name``, in order.

    ``name`` need not begin the line: part of a line from stderr may precede it.
    """
    found = re.findall(rf"{name} (\{{.*\}})$", text, re.MULTILINE)
    return [json.loads(item) for item in found]


@dataclass
class Ended:
    """A task that has ended. A negative status is the number of a signal."""

    status: int
    output: str
    events: list[dict[str, Any]] = field(default_factory=list)

    def said(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make this process a subreaper, as an agent is (prctl(2)).

    Only for as long as needed: nothing here waits for the orphans of other tests, and
    a PID namespace ends only after all of its processes have been waited for.
    """
    _set_subreaper(wanted=True)
    try:
        yield
    finally:
        _set_subreaper(wanted=False)


def _set_subreaper(*, wanted: bool) -> None:
    import ctypes

    set_child_subreaper = 36
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(set_child_subreaper, int(wanted), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


_unfinished: set[int] = set()


def kill_leftovers() -> None:
    """Kill the tasks that a failed test has left behind."""
    while _unfinished:
        pid = _unfinished.pop()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class Running:
    """A task: its pid, and the ends of its output pipe and events socket."""

    def __init__(self, pid: int, output: int, events: socket.socket) -> None:
        self.pid = pid
        _unfinished.add(pid)
        self.events = events
        self._output = bytearray()
        self._events = bytearray()
        self._threads = [
            threading.Thread(target=self._read_output, args=(output,), daemon=True),
            threading.Thread(target=self._read_events, daemon=True),
        ]
        self._grown = threading.Condition()
        for thread in self._threads:
            thread.start()

    def _read_output(self, fd: int) -> None:
        with os.fdopen(fd, "rb", buffering=0) as stream:
            while data := stream.read(65536):
                with self._grown:
                    self._output += data
                    self._grown.notify_all()

    def _read_events(self) -> None:
        # If the task has not read our last question, the connection is reset.
        with self.events, suppress(ConnectionResetError):
            while data := self.events.recv(65536):
                with self._grown:
                    self._events += data
                    self._grown.notify_all()

    @property
    def output(self) -> str:
        return bytes(self._output).decode(errors="replace")

    def said(self) -> list[dict[str, Any]]:
        whole = bytes(self._events).rpartition(b"\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def wait_for_output(self, text: str, timeout_s: float = DEADLINE_S) -> None:
        with self._grown:
            found = self._grown.wait_for(lambda: text in self.output, timeout_s)
        assert found, f"{text!r} is not in {self.output!r}"

    def wait_for_event(self, kind: str, **keys: Any) -> dict[str, Any]:
        wanted = {"type": kind, **keys}.items()

        def event() -> dict[str, Any] | None:
            return next((e for e in self.said() if wanted <= e.items()), None)

        with self._grown:
            found = self._grown.wait_for(event, DEADLINE_S)
        assert found, f"no {kind!r} in {self.said()}; output: {self.output}"
        return found

    def ask(self, kind: str) -> None:
        self.events.sendall(json.dumps({"type": kind}).encode() + b"\n")

    def end(self, timeout_s: float = DEADLINE_S) -> Ended:
        """Wait until the task ends; kill it at the deadline."""
        _unfinished.discard(self.pid)
        status = wait_for_exit(self.pid, timeout_s)
        for thread in self._threads:
            thread.join(DEADLINE_S)
        return Ended(os.waitstatus_to_exitcode(status), self.output, self.said())


def wait_for_exit(pid: int, timeout_s: float) -> int:
    """waitpid with a deadline, using a pidfd."""
    descriptor = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([descriptor], [], [], timeout_s)
    finally:
        os.close(descriptor)
    if not ready:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise AssertionError(f"process {pid} did not end within {timeout_s} s")
    return os.waitpid(pid, 0)[1]


class WarmInterpreter:
    """A client of ``tfcluster.runtime.warm.preloader``."""

    def __init__(self, env: Mapping[str, str], log: Path) -> None:
        ours, theirs = socket.socketpair()
        fd = str(theirs.fileno())
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                module_argv((sys.executable,), "tfcluster.runtime.warm.preloader", fd),
                pass_fds=[theirs.fileno()],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        theirs.close()
        ours.settimeout(DEADLINE_S)
        self.socket = ours
        self._lines = ours.makefile("rb")

    def hear(self) -> dict[str, Any]:
        line = self._lines.readline()
        assert line, "the warm interpreter hung up"
        message: dict[str, Any] = json.loads(line)
        return message

    def ask(self, request: Mapping[str, Any], fds: list[int]) -> dict[str, Any]:
        data = json.dumps({"type": "fork", "id": 7, **request}).encode() + b"\n"
        socket.send_fds(self.socket, [data], fds)
        return self.hear()

    def start(
        self, argv: list[str], cwd: Path, env: Mapping[str, str | None] | None = None
    ) -> Running:
        reading, writing = os.pipe()
        ours, theirs = socket.socketpair()
        try:
            answer = self.ask(
                {"argv": argv, "env": dict(env or {}), "cwd": str(cwd)},
                [writing, theirs.fileno()],
            )
        finally:
            os.close(writing)
            theirs.close()
        assert answer["type"] == "forked", answer
        return Running(answer["pid"], reading, ours)

    def close(self) -> int:
        self._lines.close()
        self.socket.close()
        return self.process.wait(DEADLINE_S)


def start_cold(
    argv: list[str], cwd: Path, env: Mapping[str, str] | None = None
) -> Running:
    """Start a task in a new interpreter."""
    reading, writing = os.pipe()
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            module_argv((sys.executable,), "tfcluster.runtime.task.bootstrap", *argv),
            pass_fds=[theirs.fileno()],
            env={**os.environ, **(env or {}), "TFCLUSTER_EVENTS": str(theirs.fileno())},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            start_new_session=True,
        )
    os.close(writing)
    # Running waits for the pid; without this, Popen would warn that it still runs.
    process.returncode = 0
    return Running(process.pid, reading, ours)


@contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Ports that are bound with SO_REUSEPORT but not listened on, as an agent does."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for held in sockets:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(("0.0.0.0", 0))
        yield [held.getsockname()[1] for held in sockets]
    finally:
        for held in sockets:
            held.close()
