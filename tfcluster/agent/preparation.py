"""Prepares the host before anything is imported: runs setup lines, makes environments.

A login shell runs the lines, and answers with the environment that they leave. Every
process that is started later gets it. Knows neither tasks nor warm interpreters.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence

from tfcluster.agent.environments import hold, maker_argv
from tfcluster.agent.signals import end_words, send_group
from tfcluster.agent.spawn import SpawnedProgram, SpawnError, environment, spawn
from tfcluster.agent.tasks import RunServices
from tfcluster.base.light_dataclasses import dataclass
from tfcluster.protocol import local, messages
from tfcluster.protocol.frames import encode
from tfcluster.protocol.requests import Prepare
from tfcluster.protocol.wire import parse

# Arguments: the descriptor of a file with the lines, and of one for the answer. Both
# are files without a name, so that neither the lines nor the environment appear in an
# argument. The trap reports a failed command of the lines themselves, but not one in a
# file that they source: conda's, for example, tries commands that may fail.
_DRIVER = r"""
tfcluster_lines=/dev/fd/$1 tfcluster_answer=$2
set --
tfcluster_before=$(type -P python || type -P python3 || :)
tfcluster_failed() {
  if [[ ${BASH_SOURCE[1]} == "$tfcluster_lines" ]]; then
    printf 'failed\0%s\0%s\0' "$1" "$2" >&"$tfcluster_answer"
    exit 1
  fi
}
trap 'tfcluster_failed "$LINENO" "$?"' ERR
. "$tfcluster_lines"
tfcluster_status=$?
trap - ERR
if [[ $tfcluster_status != 0 && -z ${tfcluster_reached_end-} ]]; then
  printf 'unread\0%s\0' "$tfcluster_status" >&"$tfcluster_answer"
  exit 1
fi
tfcluster_after=$(type -P python || type -P python3 || :)
printf 'done\0%s\0%s\0' "$tfcluster_before" "$tfcluster_after" >&"$tfcluster_answer"
exec "$BASH" --norc --noprofile -p -c '
while IFS= read -r -d "" entry; do
  printf "%s\0" "$entry"
done < /proc/self/environ' >&"$tfcluster_answer"
"""
_LAST_LINE = "\ntfcluster_reached_end=1\n"
_OF_THE_SHELL = (b"_", b"SHLVL", b"PWD", b"OLDPWD")


@dataclass(frozen=True, slots=True)
class Captured:
    """The environment after the last line."""

    env: dict[bytes, bytes]
    python: str | None
    """The first Python on the PATH, if the lines changed it."""


@dataclass(frozen=True, slots=True)
class LineFailed:
    """A line failed; ``line`` counts from 1, or is None if it is unknown."""

    cause: str
    line: int | None = None


def parse_answer(answer: bytes, exit_status: int) -> Captured | LineFailed:
    """What the shell wrote; ``exit_status`` is as in waitpid(2)."""
    kind, _, rest = answer.partition(b"\0")
    if kind == b"failed":
        line, status, _ = rest.split(b"\0", 2)
        return LineFailed(f"failed with exit status {int(status)}", int(line))
    if kind == b"unread":
        status = rest.partition(b"\0")[0]
        return LineFailed(f"were not read to their end (status {int(status)})")
    if kind != b"done" or not rest.endswith(b"\0"):
        where = "the lines" if answer else "the lines or the login profile"
        words = f"{where} ended the shell, which {end_words(exit_status)}"
        return LineFailed(f"ended early: {words}")
    before, after, entries = rest.split(b"\0", 2)
    env = {
        name: value
        for name, equals, value in (e.partition(b"=") for e in entries.split(b"\0"))
        if equals and name not in _OF_THE_SHELL
    }
    changed = after if after != before else b""
    return Captured(env, changed.decode("utf-8", "surrogateescape") or None)


_MARKS = b"TFCLUSTER_"
_MAX_ANSWER_BYTES = 8 << 20
_LOOK_S = 1.0
_LINE_S = 15.0


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
        self._failure: LineFailed | None = None
        self._python: str | None = None
        self._environment: str | None = None
        self._next: Callable[[], None] | None = None
        self._of = "setup"
        self._read_bytes = 0
        self._told = 0.0
        self._held: int | None = None
        """A descriptor that protects the environment from removal while we live."""

    def start(self, request: Prepare) -> None:
        """Begin; `prepared` or `unprepared` is reported at the end."""
        if self._request is not None:
            self._fail(LineFailed("a second 'prepare'"))
            return
        self._request = request
        self._run_lines(request)

    def _run_lines(self, request: Prepare) -> None:
        self._next = self._make_environment
        if request.setup is None:
            self._make_environment()
            return
        text = request.setup + _LAST_LINE
        lines, answer = _file(text.encode("utf-8", "surrogateescape")), _file(b"")
        words = ("tfcluster", str(lines), str(answer))
        argv = ("bash", "--login", "-c", _DRIVER, *words)
        try:
            self._spawn(request, argv, answer, lines, self._lines_ended)
        finally:
            os.close(lines)

    def _lines_ended(self, answer: bytes, status: int) -> None:
        match parse_answer(answer, status):
            case LineFailed() as failed:
                self._failure = failed
            case Captured(env, python):
                base = self._shared.base
                marks = {k: v for k, v in base.items() if k.startswith(_MARKS)}
                base.clear()
                base.update({**env, **marks})
                self._python = python

    def _make_environment(self) -> None:
        """Find or make the environment of these requirements."""
        self._next, self._of = self._done, "environment"
        request = self._request
        if request is None or request.environment is None:
            self._done()
            return
        wanted = request.environment
        changed = self._python is not None and not wanted.configured
        python = (str(self._python),) if changed else wanted.python
        task = _file(encode(local.Make(wanted, python, request.cwd)))
        answer = _file(b"")
        try:
            argv = maker_argv(task, answer)
            self._spawn(request, argv, answer, task, self._environment_ended)
        finally:
            os.close(task)
        if self._step is not None:
            self._look(self._step)

    def _look(self, step: _Step) -> None:
        """Report news, or at least that the maker is still at work."""
        if self._step is not step or step.status is not None or step.closed:
            return
        self._shared.channel.send(messages.Making(None))
        self._tell(os.pread(step.answer, _MAX_ANSWER_BYTES, 0))
        self._shared.loop.later(_LOOK_S, lambda: self._look(step))

    def _tell(self, answer: bytes) -> None:
        """Report what the maker does, and now and then a line that pip prints."""
        lines = answer[self._read_bytes :].splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        self._read_bytes += sum(map(len, whole))
        answers = [local.decode_of_maker(parse(line)) for line in whole]
        now = self._shared.loop.now()
        last = next((a for a in reversed(answers) if isinstance(a, local.Line)), None)
        for each in answers:
            due = each is last and now - self._told >= _LINE_S
            if isinstance(each, local.MakerOutput) or (
                isinstance(each, local.Line) and due
            ):
                self._told = now
                self._shared.channel.send(messages.Making(each.text))

    def _environment_ended(self, answer: bytes, status: int) -> None:
        self._tell(answer)
        lines = answer.splitlines()
        match local.decode_of_maker(parse(lines[-1])) if lines else None:
            case local.Made(python, home):
                self._environment = python
                self._hold(home)
            case local.Unmade(cause):
                self._failure = LineFailed(cause)
            case _:
                words = end_words(status)
                cause = f"the maker of the environment ended early: it {words}"
                self._failure = LineFailed(cause)

    def _hold(self, home: str) -> None:
        try:
            self._held = hold(home)
        except OSError as error:
            self._failure = LineFailed(f"{home}: {error.strerror}")
            return
        if self._held is None:
            cause = f"{home} is being removed at this moment: launch again"
            self._failure = LineFailed(cause)

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
            pid = spawn(SpawnedProgram(argv, env, request.cwd), write_end, answer, more)
        except SpawnError as error:
            self._shared.capture.drop(stream)
            os.close(answer)
            self._fail(LineFailed(str(error)))
            return
        finally:
            os.close(write_end)
        self._foreign.add(pid)
        self._step = _Step(pid, stream, answer, ended)

    def ended(self, pid: int, status: int) -> bool:
        """Note that a child was reaped; returns whether it was a step's process."""
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
        """Note that all output of an ended step is in its file."""
        step = self._step
        if step is None or step.stream != stream or step.status is None:
            return
        self._shared.capture.drop(stream)
        self._step = None
        if step.closed:
            return
        if self._failure is not None:
            self._fail(self._failure, tail)
        elif self._next is not None:
            self._next()

    def _done(self) -> None:
        self._shared.channel.send(messages.Prepared(self._python, self._environment))

    def _fail(self, failed: LineFailed, tail: Sequence[str] = ()) -> None:
        message = messages.Unprepared(failed.cause, failed.line, self._of, tuple(tail))
        self._shared.channel.send(message)

    def close(self) -> None:
        """End the processes that still run; their answers are no longer needed."""
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
