"""Starts kept interpreters for the command ``warm``, lists them and ends them.

The interpreters outlive this agent: once ready, they no longer belong to the run.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress

from tfcluster.agent import proc
from tfcluster.agent.constants import EVENT_BYTES, TAIL_LINES
from tfcluster.agent.frames import EndKept, Keep, ListKept
from tfcluster.agent.kept import client, lifetime, places
from tfcluster.agent.kept.fitness import Wanted, misfit, program, text_environment
from tfcluster.agent.light_dataclasses import dataclass, field
from tfcluster.agent.proc import Process
from tfcluster.agent.signals import send_group
from tfcluster.agent.spawn import (
    Environment,
    Program,
    SpawnError,
    environment,
    spawn,
    with_folders_first,
)
from tfcluster.agent.tasks import RunServices
from tfcluster.import_variables import relative_folder
from tfcluster.wire import Frame, LineBuffer, WireError, encode, parse

# As in runtime/warm/descent.py, which writes the marks of runs there.
_MARKS = "TFCLUSTER_KEPT"
_MARKS_BYTES = 400
_OURS = b"TFCLUSTER_"
_STATE = b"TFCLUSTER_STATE_DIR"
_READ_BYTES = 1 << 16
_TAIL_BYTES = 1 << 14


@dataclass(eq=False)
class _Starting:
    """An interpreter that is still importing."""

    request: Keep
    pid: int
    end: socket.socket
    path: str
    lines: LineBuffer = field(default_factory=lambda: LineBuffer(EVENT_BYTES))
    cause: str | None = None
    """The reason that the interpreter gave why it cannot be kept."""


class Keeping:
    """The interpreters that this agent has started to be kept."""

    def __init__(
        self,
        shared: RunServices,
        spare: Callable[[Process], None],
    ) -> None:
        self._shared = shared
        self._children: set[int] = set()
        self._spare = spare
        self._starting: list[_Starting] = []

    def obey(self, request: Keep | ListKept | EndKept) -> None:
        send = self._shared.reports.send
        match request:
            case Keep():
                self._keep(request)
            case ListKept():
                send("kept_list", interpreters=client.listed(os.environ))
            case EndKept(purpose):
                send("ended_kept", pids=client.end(os.environ, purpose))

    def _keep(self, request: Keep) -> None:
        env = self._environment(request)
        wanted = Wanted(request.argv, env)
        for each in client.found(os.environ):
            if misfit(each.about, wanted) is None:
                with suppress(OSError, WireError):
                    renewal = {"type": "renew", "keep_s": request.keep_s}
                    self._kept(request, client.ask(each.path, renewal), renewed=True)
                    return
        try:
            self._start(request, env)
        except OSError as error:
            self._fail(request, error.strerror or str(error))
        except (SpawnError, WireError) as error:
            self._fail(request, str(error))

    def _environment(self, request: Keep) -> Environment:
        """The environment without the run's marks: the interpreter outlives the run."""
        base = {
            name: value
            for name, value in self._shared.base.items()
            if not name.startswith(_OURS) or name == _STATE
        }
        changes = with_folders_first(base, request.env, request.prepend)
        return environment(base, changes)

    def _start(self, request: Keep, env: Environment) -> None:
        text = text_environment(env)
        file = program(request.argv[0], text)
        if file is None:
            raise SpawnError(f"there is no program {request.argv[0]!r}")
        if name := relative_folder(text):
            raise SpawnError(
                f"{name} contains a relative folder, so what is imported depends on "
                "the working folder"
            )
        job = lifetime.job(os.environ)
        listener, path = places.listen(os.environ)
        ours, theirs = socket.socketpair()
        try:
            pid = self._spawn(request, env, theirs, listener, places.log_of(path))
            terms = {
                "type": "terms",
                "argv": list(request.argv),
                "program": file,
                "env": text,
                "purpose": request.purpose,
                "strategy": request.strategy,
                "keep_s": request.keep_s,
                "path": path,
                "log": places.log_of(path),
                "inode": os.lstat(path).st_ino,
                "login": lifetime.login() if request.ends_at_logout else None,
                "job": None if job is None else [job.pid, job.start_time],
            }
            ours.sendall(encode(terms))
        except (OSError, SpawnError, WireError):
            ours.close()
            places.remove(path)
            raise
        finally:
            theirs.close()
            listener.close()
        self._children.add(pid)
        starting = _Starting(request, pid, ours, path)
        self._starting.append(starting)
        ours.setblocking(False)
        self._shared.loop.watch(ours.fileno(), lambda: self._read(starting))

    @staticmethod
    def _spawn(
        request: Keep,
        env: Environment,
        theirs: socket.socket,
        listener: socket.socket,
        log: str,
    ) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        output = os.open(log, flags, 0o600)
        room = {_MARKS: "x" * _MARKS_BYTES}
        fds = (theirs.fileno(), listener.fileno())
        argv = (*request.argv, *map(str, fds))
        try:
            return spawn(Program(argv, environment(env, room), "/"), output, *fds)
        finally:
            os.close(output)

    def _read(self, starting: _Starting) -> None:
        try:
            data = starting.end.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            for line in starting.lines.feed(data):
                self._take(starting, parse(line))
        except WireError as error:
            starting.cause = str(error)
            data = b""
        if not data and starting in self._starting:
            self._forget(starting)
            log = places.log_of(starting.path)
            if starting.cause is None:
                cause = "it has ended during the import"
                self._fail(starting.request, cause, _tail(log))
            else:
                self._fail(starting.request, starting.cause)
            self._discard(starting)

    def _take(self, starting: _Starting, frame: Frame) -> None:
        if frame["type"] == "unfit":
            starting.cause = str(frame.get("cause"))
        elif frame["type"] == "ready":
            known = proc.read(starting.pid)
            if known is not None:
                self._spare(known)
            starting.end.setblocking(True)
            with suppress(OSError):
                starting.end.sendall(encode({"type": "keep"}))
            self._forget(starting)
            self._kept(starting.request, frame, renewed=False)

    def _forget(self, starting: _Starting) -> None:
        self._starting.remove(starting)
        self._shared.loop.unwatch(starting.end.fileno())
        starting.end.close()

    def _discard(self, starting: _Starting) -> None:
        if starting.pid in self._children:  # not reaped yet
            send_group(starting.pid, signal.SIGKILL)
        places.remove(starting.path)

    def _kept(self, request: Keep, about: Frame, *, renewed: bool) -> None:
        self._shared.reports.send(
            "kept",
            key=request.key,
            pid=about.get("pid"),
            libraries=about.get("libraries"),
            seconds=about.get("seconds"),
            renewed=renewed,
        )

    def _fail(self, request: Keep, cause: str, tail: list[str] | None = None) -> None:
        key = request.key
        self._shared.reports.send("unkept", key=key, cause=cause, tail=tail or [])

    def ended(self, pid: int) -> bool:
        """Note that a child was reaped; returns whether we had started it."""
        known = pid in self._children
        self._children.discard(pid)
        return known

    def close(self) -> None:
        """End the interpreters that are not ready yet; the others are kept."""
        for starting in list(self._starting):
            self._forget(starting)
            self._discard(starting)


def _tail(path: str) -> list[str]:
    """The last lines of a log."""
    with suppress(OSError), open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        text = file.read().decode(errors="backslashreplace")
        return text.splitlines()[-TAIL_LINES:]
    return []
