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
from tfcluster.protocol.frames import ProtocolError, encode
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
class StepFailed:
    """A step failed; ``line`` of the setup counts from 1, or is None if unknown."""

    cause: str
    line: int | None = None


def parse_answer(answer: bytes, exit_status: int) -> Captured | StepFailed:
    """What the shell wrote; ``exit_status`` is as in waitpid(2)."""
    kind, _, rest = answer.partition(b"\0")
    if kind == b"failed":
        line, status, _ = rest.split(b"\0", 2)
        return StepFailed(f"failed with exit status {int(status)}", int(line))
    if kind == b"unread":
        status = rest.partition(b"\0")[0]
        return StepFailed(f"were not read to their end (status {int(status)})")
    if kind != b"done" or not rest.endswith(b"\0"):
        where = "the lines" if answer else "the lines or the login profile"
        words = f"{where} ended the shell, which {end_words(exit_status)}"
        return StepFailed(f"ended early: {words}")
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
_PROGRESS_S = 1.0


@dataclass(eq=False)
class _Step:
    """A process that prepares the host, and the file with its answer."""

    name: str
    pid: int
    stream: int
    answer: int
    ended: Callable[[bytes, int], StepFailed | None]
    """Handles the answer and the wait status."""
    next_step: Callable[[], None]
    read_bytes: int = 0
    last_word: local.OfMaker | None = None
    status: int | None = None
    failure: StepFailed | None = None
    closed: bool = False


class Preparation:
    """The preparation of this host; each step is a child of the agent."""

    def __init__(self, shared: RunServices, foreign: set[int]) -> None:
        self._shared = shared
        self._foreign = foreign
        self._started = False
        self._step: _Step | None = None
        self._python: str | None = None
        self._environment: str | None = None
        self._lock: int | None = None
        """A descriptor that protects the environment from removal while we live."""

    def start(self, request: Prepare) -> None:
        """Begin; `prepared` or `unprepared` is reported at the end."""
        if self._started:
            raise ProtocolError("a second 'prepare'")
        self._started = True
        if request.setup is None:
            self._make_environment(request)
            return
        text = request.setup + _LAST_LINE
        self._spawn(
            request,
            "setup",
            text.encode("utf-8", "surrogateescape"),
            lambda lines, answer: (
                *("bash", "--login", "-c", _DRIVER),
                *("tfcluster", str(lines), str(answer)),
            ),
            self._lines_ended,
            lambda: self._make_environment(request),
        )

    def _lines_ended(self, answer: bytes, status: int) -> StepFailed | None:
        result = parse_answer(answer, status)
        if isinstance(result, StepFailed):
            return result
        base = self._shared.base
        marks = {k: v for k, v in base.items() if k.startswith(_MARKS)}
        base.clear()
        base.update({**result.env, **marks})
        self._python = result.python
        return None

    def _make_environment(self, request: Prepare) -> None:
        """Find or make the environment of these requirements."""
        spec = request.environment
        if spec is None:
            self._done()
            return
        python = spec.python
        if self._python is not None and not spec.configured:
            python = (self._python,)
        make = encode(local.Make(spec, python, request.cwd))
        name = "environment"
        self._spawn(request, name, make, maker_argv, self._maker_ended, self._done)
        if self._step is not None:
            self._show_progress(self._step)

    def _show_progress(self, step: _Step) -> None:
        """Report what the maker says, or at least that it is still at work."""
        if self._step is step and step.status is None and not step.closed:
            self._shared.channel.send(messages.Making(None))
            self._relay(step, os.pread(step.answer, _MAX_ANSWER_BYTES, 0))
            self._shared.loop.later(_PROGRESS_S, lambda: self._show_progress(step))

    def _relay(self, step: _Step, answer: bytes) -> None:
        """Report what the maker has said since the last call."""
        end = answer.rfind(b"\n") + 1
        for line in answer[step.read_bytes : end].splitlines():
            step.last_word = word = local.decode_of_maker(parse(line))
            if isinstance(word, local.MakerOutput):
                self._shared.channel.send(messages.Making(word.text))
        step.read_bytes = end

    def _maker_ended(self, answer: bytes, status: int) -> StepFailed | None:
        step = self._step
        assert step is not None  # it has just ended
        self._relay(step, answer)
        match step.last_word:
            case local.Made(python, home):
                self._environment = python
                return self._hold(home)
            case local.Unmade(cause):
                return StepFailed(cause)
        cause = f"the maker of the environment ended early: it {end_words(status)}"
        return StepFailed(cause)

    def _hold(self, home: str) -> StepFailed | None:
        try:
            self._lock = hold(home)
        except OSError as error:
            return StepFailed(f"{home}: {error.strerror}")
        if self._lock is None:
            return StepFailed(f"{home} is being removed at this moment: launch again")
        return None

    def _spawn(
        self,
        request: Prepare,
        name: str,
        content: bytes,
        argv: Callable[[int, int], tuple[str, ...]],
        ended: Callable[[bytes, int], StepFailed | None],
        next_step: Callable[[], None],
    ) -> None:
        """Start a step. ``argv`` gets two descriptors: ``content``, and the answer."""
        task, answer = _file(content), _file(b"")
        read_end, write_end = os.pipe()
        stream = next(self._shared.streams)
        self._shared.capture.add(stream, read_end, request.log, source=None)
        env = environment(self._shared.base, request.env)
        program = SpawnedProgram(argv(task, answer), env, request.cwd)
        try:
            pid = spawn(program, write_end, answer, task)
        except SpawnError as error:
            self._shared.capture.drop(stream)
            os.close(answer)
            self._fail(name, StepFailed(str(error)))
            return
        finally:
            os.close(write_end)
            os.close(task)
        self._foreign.add(pid)
        self._step = _Step(name, pid, stream, answer, ended, next_step)

    def ended(self, pid: int, status: int) -> bool:
        """Note that a child was reaped; returns whether it was a step's process."""
        step = self._step
        if step is None or step.pid != pid or step.status is not None:
            return False
        step.status = status
        self._foreign.discard(pid)
        answer = os.pread(step.answer, _MAX_ANSWER_BYTES, 0)
        os.close(step.answer)
        step.failure = step.ended(answer, status)
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
        if step.failure is not None:
            self._fail(step.name, step.failure, tail)
        else:
            step.next_step()

    def _done(self) -> None:
        self._shared.channel.send(messages.Prepared(self._python, self._environment))

    def _fail(self, step: str, failed: StepFailed, tail: Sequence[str] = ()) -> None:
        message = messages.Unprepared(failed.cause, failed.line, step, tuple(tail))
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
    with open(descriptor, "wb", closefd=False) as stream:
        stream.write(content)
    return descriptor
