"""Warm interpreters (fork servers): each imports once, then forks tasks on request.

Tasks outlive them: the death of an interpreter only fails the forks it still owes.
Knows the protocol of these interpreters, but not what they import.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from tfcluster.agent.events import EVENT_BYTES
from tfcluster.agent.services import HelperProgram, RunServices
from tfcluster.agent.signals import end_words
from tfcluster.agent.spawn import (
    SpawnedProgram,
    SpawnError,
    environment,
    with_folders_first,
)
from tfcluster.agent.task import AgentTask
from tfcluster.agent.tasks import CLOSE_LOOK_S, Ends, TaskTable
from tfcluster.base.light_dataclasses import dataclass, field
from tfcluster.protocol import local, messages
from tfcluster.protocol.frames import ProtocolError, encode
from tfcluster.protocol.requests import Start, Warm
from tfcluster.protocol.wire import (
    BLAMES_WRAPPER,
    UNFORKABLE,
    LineBuffer,
    WireError,
    parse,
)

_READ_BYTES = 64 << 10
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


@dataclass(eq=False)
class _Interpreter:
    request: Warm
    began: float
    end: socket.socket
    program: HelperProgram | None = None
    ready: bool = False
    unfit: str | None = None
    """The reason that the interpreter gave why no task can run in it."""
    lines: LineBuffer = field(default_factory=lambda: LineBuffer(EVENT_BYTES))
    unwritten: deque[_Request] = field(default_factory=deque)
    asked: dict[int, _Request] = field(default_factory=dict)
    writing: bool = False
    closed: bool = False  # by us

    @property
    def status(self) -> int | None:
        return None if self.program is None else self.program.status

    @property
    def alive(self) -> bool:
        return self.status is None and self.end.fileno() >= 0

    @property
    def serves_wrapped(self) -> bool:
        """Whether it runs below a wrapper and owes no fork."""
        idle = self.ready and not self.unwritten and not self.asked
        return self.request.wrapped and idle

    @property
    def blames_wrapper(self) -> str | None:
        """``unforkable`` or ``unusable`` if its wrapper made it end, or None."""
        if self.status is None or self.ready or not self.request.wrapped:
            return None
        if not os.WIFEXITED(self.status):
            return None
        return BLAMES_WRAPPER.get(os.WEXITSTATUS(self.status))


class WarmInterpreters:
    """All warm interpreters of this host, by key."""

    def __init__(self, shared: RunServices, tasks: TaskTable) -> None:
        self._shared = shared
        self._tasks = tasks
        self._interpreters: dict[str, _Interpreter] = {}
        self._requests = 0
        self.on_begun: Callable[[AgentTask], None] = lambda task: None

    def start(self, request: Warm) -> None:
        """Start an interpreter. A failure is reported as `cold`."""
        old = self._interpreters.get(request.key)
        if old is not None and old.status is None:
            self._cold(request.key, "a warm interpreter already has this key", [])
            return
        try:
            interpreter = self._spawn(request)
        except SpawnError as error:
            self._cold(request.key, str(error), [])
            return
        self._interpreters[request.key] = interpreter
        interpreter.end.setblocking(False)
        self._shared.loop.watch(
            interpreter.end.fileno(), lambda: self._read(interpreter)
        )

    def _spawn(self, request: Warm) -> _Interpreter:
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise SpawnError(f"no pipes: {error.strerror}") from error
        base, number = self._shared.base, theirs.fileno()
        interpreter = _Interpreter(request, self._shared.loop.now(), ours)
        argv = (*request.argv, str(number))
        if request.wrapped:
            argv += (str(os.getpid()),)
        env = environment(base, with_folders_first(base, request.env, request.prepend))
        try:
            interpreter.program = HelperProgram(
                self._shared,
                "a warm interpreter",
                SpawnedProgram(argv, env, request.cwd),
                request.log,
                number,
                on_end=lambda status: self._ended(interpreter, status),
                on_output=lambda tail: self._drained(interpreter, tail),
                # A wrapper may close descriptors, but hardly ever its standard input.
                stdin=number if request.wrapped else subprocess.DEVNULL,
            )
        except SpawnError:
            ours.close()
            raise
        finally:
            theirs.close()
        return interpreter

    def fork(self, request: Start) -> None:
        """Fork a task once the imports are done. A failure is reported."""
        interpreter = self._interpreters.get(request.warm or "")
        prepared = self._tasks.prepare(request)
        if prepared is None:
            return
        task, ends = prepared
        if interpreter is None or not interpreter.alive:
            ends.close()
            gone = "has ended" if interpreter else "was never started"
            self._tasks.failed(task, f"the warm interpreter {request.warm!r} {gone}")
            return
        self._requests += 1
        env = self._tasks.changes(task)
        line = encode(local.Fork(self._requests, request.argv, env, request.cwd))
        interpreter.unwritten.append(_Request(self._requests, task, ends, line))
        self._write(interpreter)

    def _ended(self, interpreter: _Interpreter, status: int) -> None:
        while interpreter.end.fileno() >= 0 and self._read(interpreter):
            pass
        self._close(interpreter)
        self._fail_all(interpreter, end_words(status))

    def _drained(self, interpreter: _Interpreter, tail: list[str]) -> None:
        """Report the end, now that all output is in the file."""
        if not interpreter.closed:
            self._cold(
                interpreter.request.key,
                interpreter.unfit or end_words(interpreter.status or 0),
                tail,
                unfit=interpreter.unfit is not None,
                wrapper=interpreter.blames_wrapper,
            )

    def close(self) -> None:
        """End all interpreters; their tasks continue."""
        for interpreter in self._interpreters.values():
            if interpreter.serves_wrapped:
                self._close_after_tasks(interpreter)
            else:
                self._end(interpreter)

    def _close_after_tasks(self, interpreter: _Interpreter) -> None:
        """Close it after its tasks: the end of a container's first process can unmount
        the image."""
        if self._tasks.over:
            self._end(interpreter)
        else:
            again = partial(self._close_after_tasks, interpreter)
            self._shared.loop.later(CLOSE_LOOK_S, again)

    def _end(self, interpreter: _Interpreter) -> None:
        if interpreter.status is not None or interpreter.closed:
            return
        interpreter.closed = True
        self._close(interpreter)
        if interpreter.serves_wrapped:
            # It ends by itself; its wrapper ends after it, and may clean up first.
            self._shared.loop.later(_WRAPPER_END_S, lambda: self._signal(interpreter))
        else:
            # An interpreter that is still importing would notice that only later.
            self._signal(interpreter, signal.SIGTERM)
        self._fail_all(interpreter, "is being closed")

    @property
    def over(self) -> bool:
        return all(i.status is not None for i in self._interpreters.values())

    def _write(self, interpreter: _Interpreter) -> None:
        if not interpreter.ready or interpreter.writing:
            return
        while interpreter.unwritten:
            request = interpreter.unwritten[0]
            try:
                self._write_some(interpreter, request)
            except BlockingIOError:
                interpreter.writing = True
                self._shared.loop.later(
                    _WRITE_AGAIN_S, lambda: self._write_again(interpreter)
                )
                return
            except OSError:
                return  # it is dying; its exit fails all requests
            if not request.rest:
                interpreter.unwritten.popleft()

    def _write_again(self, interpreter: _Interpreter) -> None:
        interpreter.writing = False
        if interpreter.alive:
            self._write(interpreter)

    def _write_some(self, interpreter: _Interpreter, request: _Request) -> None:
        if request.ends is None:
            written = interpreter.end.send(request.rest)
        else:
            # The descriptors go with the first byte of the line.
            fds = [request.ends.output, request.ends.events.fileno()]
            written = socket.send_fds(interpreter.end, [request.rest], fds)
            request.ends.close()
            request.ends = None
            interpreter.asked[request.id] = request
        request.rest = request.rest[written:]

    def _read(self, interpreter: _Interpreter) -> bool:
        try:
            data = interpreter.end.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            # It is exiting; `ended` learns its status.
            self._close(interpreter)
            self._shared.loop.later(_END_S, lambda: self._signal(interpreter))
            return False
        try:
            for line in interpreter.lines.feed(data):
                self._obey(interpreter, local.decode_of_interpreter(parse(line)))
        except WireError as error:
            note = f"warm interpreter {interpreter.request.key!r}: {error}"
            self._shared.channel.send(messages.Note(note))
            self._signal(interpreter)
            self._close(interpreter)
            return False
        return True

    @staticmethod
    def _signal(interpreter: _Interpreter, signum: int = signal.SIGKILL) -> None:
        if interpreter.program is not None:
            interpreter.program.send_group(signum)

    def _obey(self, interpreter: _Interpreter, answer: local.OfInterpreter) -> None:
        match answer:
            case local.Ready():
                self._ready(interpreter)
            case local.Unfit(cause):
                interpreter.unfit = cause[:_CAUSE_CHARS]
            case local.Forked(number, pid):
                if pid <= 1:
                    raise ProtocolError(f"{pid!r} is not a pid")
                self._begun(self._asked(interpreter, number), pid)
            case local.ForkFailed(number, cause):
                task = self._asked(interpreter, number)
                self._tasks.failed(task, cause[:_CAUSE_CHARS])

    @staticmethod
    def _asked(interpreter: _Interpreter, number: int) -> AgentTask:
        """The task of a request that has been answered."""
        if number not in interpreter.asked:
            raise ProtocolError(f"answered request {number!r}, which was not made")
        return interpreter.asked.pop(number).task

    def _ready(self, interpreter: _Interpreter) -> None:
        if not interpreter.ready:
            interpreter.ready = True
            seconds = round(self._shared.loop.now() - interpreter.began, 3)
            key = interpreter.request.key
            self._shared.channel.send(messages.Warmed(key, seconds))
            self._write(interpreter)

    def _begun(self, task: AgentTask, pid: int) -> None:
        self._tasks.begun(task, pid)
        self.on_begun(task)

    def _fail_all(self, interpreter: _Interpreter, why: str) -> None:
        requests = [*interpreter.asked.values(), *interpreter.unwritten]
        interpreter.asked.clear()
        interpreter.unwritten.clear()
        for request in requests:
            if request.ends is not None:
                request.ends.close()
            self._tasks.failed(request.task, f"the warm interpreter {why}")

    def _close(self, interpreter: _Interpreter) -> None:
        if interpreter.end.fileno() >= 0:
            with suppress(KeyError):
                self._shared.loop.unwatch(interpreter.end.fileno())
            interpreter.end.close()

    def _cold(
        self,
        key: str,
        cause: str,
        tail: list[str],
        *,
        unfit: bool = False,
        wrapper: str | None = None,
    ) -> None:
        if wrapper == UNFORKABLE:
            why = tail[-1] if tail else "its wrapper does not permit forks"
            why = why.removeprefix("tfcluster: ")
            text = f"tasks are started one by one, which takes longer: {why}"
            self._shared.channel.send(messages.Note(text))
        cold = messages.Cold(key, cause, tuple(tail), unfit, wrapper)
        self._shared.channel.send(cold)
