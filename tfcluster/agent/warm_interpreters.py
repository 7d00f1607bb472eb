"""Warm interpreters (fork servers): each imports once, then forks tasks on request.

Tasks outlive them: the death of an interpreter only fails the forks it still owes.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections import deque

from tfcluster.agent.events import FrameSocket
from tfcluster.agent.run_services import HelperProgram, RunServices
from tfcluster.agent.signals import end_words
from tfcluster.agent.spawn import (
    SpawnedProgram,
    SpawnError,
    environment,
    with_folders_first,
)
from tfcluster.agent.task import AgentTask
from tfcluster.agent.tasks import CLOSE_LOOK_S, Ends, TaskTable
from tfcluster.base.light_dataclasses import dataclass
from tfcluster.protocol import local, messages
from tfcluster.protocol.frames import ProtocolError, encode
from tfcluster.protocol.requests import Start, Warm
from tfcluster.protocol.wire import BLAMES_WRAPPER, UNFORKABLE, Frame

_WRITE_AGAIN_S = 0.02
_END_S = 0.5  # from an interpreter's end of file to its exit
_WRAPPER_END_S = 3.0
_CAUSE_CHARS = 1000


@dataclass
class _Request:
    """A requested fork; ``rest`` is the part of the request not written yet."""

    id: int
    task: AgentTask
    ends: Ends | None
    rest: bytes


class _Interpreter:
    def __init__(self, shared: RunServices, tasks: TaskTable, request: Warm) -> None:
        self._shared = shared
        self._tasks = tasks
        self._request = request
        self._ready = False
        self._unfit: str | None = None
        """The reason that the interpreter gave why no task can run in it."""
        self._closed = False  # by us
        self._unwritten: deque[_Request] = deque()
        self._asked: dict[int, _Request] = {}
        self._count = 0
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise SpawnError(f"no pipes: {error.strerror}") from error
        number = theirs.fileno()
        argv = (*request.argv, str(number))
        if request.wrapped:
            argv += (str(os.getpid()),)
        changes = with_folders_first(shared.base, request.env, request.prepend)
        env = environment(shared.base, changes)
        try:
            self._program = HelperProgram(
                shared,
                "a warm interpreter",
                SpawnedProgram(argv, env, request.cwd),
                request.log,
                number,
                on_end=self._ended,
                on_output=self._drained,
                # A wrapper may close descriptors, but hardly ever its standard input.
                stdin=number if request.wrapped else subprocess.DEVNULL,
            )
        except SpawnError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._socket = FrameSocket(
            shared.loop, ours, self._obey, self._talks_nonsense, self._ends
        )

    @property
    def over(self) -> bool:
        return self._program.status is not None

    @property
    def alive(self) -> bool:
        return not self.over and self._socket.is_open

    def fork(self, task: AgentTask, ends: Ends) -> None:
        self._count += 1
        request = task.request
        env = self._tasks.changes(task)
        line = encode(local.Fork(self._count, request.argv, env, request.cwd))
        self._unwritten.append(_Request(self._count, task, ends, line))
        self._write()

    def close(self) -> None:
        """End it, below a wrapper after all tasks: its end may unmount the image."""
        if self.over or self._closed:
            return
        idle = self._ready and not self._unwritten and not self._asked
        if self._request.wrapped and idle:
            if not self._tasks.over:
                self._shared.loop.later(CLOSE_LOOK_S, self.close)
                return
            # It ends by itself; its wrapper ends after it, and may clean up first.
            self._shared.loop.later(_WRAPPER_END_S, self._program.send_group)
        else:
            # An interpreter that is still importing would notice that only later.
            self._program.send_group(signal.SIGTERM)
        self._closed = True
        self._socket.close()
        self._fail_all("is being closed")

    def _write(self) -> None:
        while self._ready and self._unwritten:
            request = self._unwritten[0]
            try:
                self._write_some(request)
            except BlockingIOError:
                self._shared.loop.later(_WRITE_AGAIN_S, self._write)
                return
            except OSError:
                return  # it is dying; its exit fails all requests
            if not request.rest:
                self._unwritten.popleft()

    def _write_some(self, request: _Request) -> None:
        if request.ends is None:
            written = self._socket.socket.send(request.rest)
        else:
            # The descriptors go with the first byte of the line.
            fds = [request.ends.output, request.ends.events.fileno()]
            written = socket.send_fds(self._socket.socket, [request.rest], fds)
            request.ends.close()
            request.ends = None
            self._asked[request.id] = request
        request.rest = request.rest[written:]

    def _obey(self, frame: Frame) -> None:
        match local.decode_of_interpreter(frame):
            case local.Ready() if not self._ready:
                self._ready = True
                self._shared.channel.send(messages.Warmed(self._request.key))
                self._write()
            case local.Unfit(cause):
                self._unfit = cause[:_CAUSE_CHARS]
            case local.Forked(number, pid):
                if pid <= 1:
                    raise ProtocolError(f"{pid!r} is not a pid")
                self._tasks.begun(self._answered(number), pid)
            case local.ForkFailed(number, cause):
                self._tasks.failed(self._answered(number), cause[:_CAUSE_CHARS])

    def _answered(self, number: int) -> AgentTask:
        if number not in self._asked:
            raise ProtocolError(f"answered request {number!r}, which was not made")
        return self._asked.pop(number).task

    def _talks_nonsense(self, cause: str) -> None:
        note = f"warm interpreter {self._request.key!r}: {cause}"
        self._shared.channel.send(messages.Note(note))
        self._program.send_group()
        self._socket.close()

    def _ends(self) -> None:
        """It has closed its end, so it should exit now."""
        self._shared.loop.later(_END_S, self._program.send_group)

    def _ended(self, status: int) -> None:
        self._socket.finish()
        self._fail_all(end_words(status))

    def _fail_all(self, why: str) -> None:
        requests = [*self._asked.values(), *self._unwritten]
        self._asked.clear()
        self._unwritten.clear()
        for request in requests:
            if request.ends is not None:
                request.ends.close()
            self._tasks.failed(request.task, f"the warm interpreter {why}")

    def _drained(self, tail: list[str]) -> None:
        """Report the end, now that all output is in the file."""
        status = self._program.status
        if self._closed or status is None:
            return
        wrapper = None
        if self._request.wrapped and not self._ready and os.WIFEXITED(status):
            wrapper = BLAMES_WRAPPER.get(os.WEXITSTATUS(status))
        if wrapper == UNFORKABLE:
            why = tail[-1] if tail else "its wrapper does not permit forks"
            why = why.removeprefix("tfcluster: ")
            text = f"tasks are started one by one, which takes longer: {why}"
            self._shared.channel.send(messages.Note(text))
        key, cause = self._request.key, self._unfit or end_words(status)
        unfit = self._unfit is not None
        cold = messages.Cold(key, cause, tuple(tail), unfit, wrapper)
        self._shared.channel.send(cold)


class WarmInterpreters:
    def __init__(self, shared: RunServices, tasks: TaskTable) -> None:
        self._shared = shared
        self._tasks = tasks
        self._interpreters: dict[str, _Interpreter] = {}

    def start(self, request: Warm) -> None:
        """Start an interpreter. A failure is reported as `cold`."""
        old = self._interpreters.get(request.key)
        if old is not None and not old.over:
            raise ProtocolError(f"a warm interpreter already has the key {request.key}")
        try:
            interpreter = _Interpreter(self._shared, self._tasks, request)
        except SpawnError as error:
            cold = messages.Cold(request.key, str(error), (), False, None)
            self._shared.channel.send(cold)
        else:
            self._interpreters[request.key] = interpreter

    def fork(self, request: Start) -> None:
        prepared = self._tasks.prepare(request)
        if prepared is None:
            return
        task, ends = prepared
        interpreter = self._interpreters.get(request.warm or "")
        if interpreter is not None and interpreter.alive:
            interpreter.fork(task, ends)
            return
        ends.close()
        gone = "has ended" if interpreter else "was never started"
        self._tasks.failed(task, f"the warm interpreter {request.warm!r} {gone}")

    def close(self) -> None:
        for interpreter in self._interpreters.values():
            interpreter.close()

    @property
    def over(self) -> bool:
        return all(interpreter.over for interpreter in self._interpreters.values())
