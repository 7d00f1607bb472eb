"""Prepares the host before anything is imported: runs the setup lines.

What they change in the environment becomes that of every process that is started later.
Knows neither tasks nor warm interpreters.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from tfcluster.agent.frames import Prepare
from tfcluster.agent.light_dataclasses import dataclass
from tfcluster.agent.login_shell import (
    Captured,
    LineFailed,
    parse_answer,
    shell_argv,
    shell_input,
)
from tfcluster.agent.signals import send_group
from tfcluster.agent.spawn import (
    Program,
    SpawnError,
    environment,
    spawn,
)
from tfcluster.agent.task import signal_name
from tfcluster.agent.tasks import RunServices

_MARKS = b"TFCLUSTER_"
_MAX_ANSWER_BYTES = 8 << 20


@dataclass(eq=False)
class _Step:
    """A process that prepares the host, and where it writes its answer."""

    pid: int
    stream: int
    answer: int
    ended: Callable[[bytes, int], None]
    status: int | None = None
    closed: bool = False


class Preparation:
    """The preparation of this host; each step is a child of the agent."""

    def __init__(self, shared: RunServices, foreign: set[int]) -> None:
        self._shared = shared
        self._foreign = foreign
        self._request: Prepare | None = None
        self._step: _Step | None = None
        self._failure: dict[str, object] | None = None
        self._python: str | None = None

    def start(self, request: Prepare) -> None:
        """Begin; `prepared` or `unprepared` is reported at the end."""
        if self._request is not None:
            self._fail("a second 'prepare'")
            return
        self._request = request
        self._run_lines(request)

    def _run_lines(self, request: Prepare) -> None:
        if request.setup is None:
            self._done()
            return
        lines, answer = _file(shell_input(request.setup)), _file(b"")
        argv = shell_argv(lines, answer)
        try:
            self._spawn(request, argv, answer, lines, self._lines_ended)
        finally:
            os.close(lines)

    def _lines_ended(self, answer: bytes, status: int) -> None:
        match parse_answer(answer, _words(status)):
            case LineFailed(line, cause):
                self._failure = {"cause": cause, "line": line}
            case Captured(env, python):
                base = self._shared.base
                marks = {k: v for k, v in base.items() if k.startswith(_MARKS)}
                base.clear()
                base.update({**env, **marks})
                self._python = python

    def _spawn(
        self,
        request: Prepare,
        argv: tuple[str, ...],
        answer: int,
        more: int,
        ended: Callable[[bytes, int], None],
    ) -> None:
        read_end, write_end = os.pipe()
        stream = next(self._shared.streams)
        self._shared.capture.add(stream, read_end, request.log, source=None)
        env = environment(self._shared.base, request.env)
        try:
            pid = spawn(Program(argv, env, request.cwd), write_end, answer, more)
        except SpawnError as error:
            self._shared.capture.drop(stream)
            os.close(answer)
            self._fail(error.cause)
            return
        finally:
            os.close(write_end)
        self._foreign.add(pid)
        self._step = _Step(pid, stream, answer, ended)

    def ended(self, pid: int, status: int) -> bool:
        """A child was reaped; returns whether it belongs to the preparation."""
        step = self._step
        if step is None or step.pid != pid or step.status is not None:
            return False
        step.status = status
        self._foreign.discard(pid)
        answer = os.pread(step.answer, _MAX_ANSWER_BYTES, 0)
        os.close(step.answer)
        step.ended(answer, status)
        self._shared.capture.drain(step.stream)
        return True

    def drained(self, stream: int, tail: list[str]) -> None:
        """The output of a step that has ended is in its file."""
        step = self._step
        if step is None or step.stream != stream or step.status is None:
            return
        self._shared.capture.drop(stream)
        self._step = None
        if step.closed:
            return
        if self._failure is not None:
            self._shared.reports.send("unprepared", **self._failure, tail=tail)
        else:
            self._done()

    def _done(self) -> None:
        self._shared.reports.send("prepared", python=self._python)

    def _fail(self, cause: str) -> None:
        self._shared.reports.send("unprepared", cause=cause, line=None, tail=[])

    def close(self) -> None:
        """End what is running; nothing of it is needed any more."""
        step = self._step
        if step is not None and step.status is None:
            step.closed = True
            send_group(step.pid, signal.SIGKILL)

    @property
    def over(self) -> bool:
        return self._step is None or self._step.status is not None


def _file(content: bytes) -> int:
    """A file without a name, with this content."""
    descriptor = os.memfd_create("tfcluster")
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    return descriptor


def _words(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"killed by SIG{signal_name(os.WTERMSIG(status))}"
    return f"exit status {os.WEXITSTATUS(status)}"
