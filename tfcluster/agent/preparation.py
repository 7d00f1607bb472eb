"""Prepares the host before anything is imported: runs setup lines, makes environments.

A login shell runs the lines, and answers with the environment that they leave. Every
process that is started later gets it. Knows neither tasks nor warm interpreters.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence

from tfcluster.agent.environments import hold, maker_argv
from tfcluster.agent.run_services import HelperProgram, RunServices
from tfcluster.agent.signals import end_words
from tfcluster.agent.spawn import SpawnedProgram, SpawnError, environment
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
class _PreparationStep:
    name: str
    answer: int
    program: HelperProgram | None = None
    read_bytes: int = 0
    last_word: local.OfMaker | None = None
    failure: StepFailed | None = None
    closed: bool = False

    @property
    def running(self) -> bool:
        return self.program is not None and self.program.status is None


class Preparation:
    """The preparation of this host; each step is a child of the agent."""

    def __init__(self, shared: RunServices) -> None:
        self._shared = shared
        self._step: _PreparationStep | None = None
        self._python: str | None = None
        self._environment: str | None = None
        self._lock: int | None = None
        """A descriptor that protects the environment from removal while we live."""

    def start(self, request: Prepare) -> None:
        """Begin; `prepared` or `unprepared` is reported at the end."""
        if self._step is not None:
            raise ProtocolError("a second 'prepare'")
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

    def _lines_ended(self, step: _PreparationStep, status: int) -> StepFailed | None:
        result = parse_answer(_content(step.answer), status)
        if isinstance(result, StepFailed):
            return result
        base = self._shared.base
        marks = {k: v for k, v in base.items() if k.startswith(_MARKS)}
        base.clear()
        base.update({**result.env, **marks})
        self._python = result.python
        return None

    def _make_environment(self, request: Prepare) -> None:
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

    def _show_progress(self, step: _PreparationStep) -> None:
        if step.running and not step.closed:
            self._shared.channel.send(messages.Making(None))
            self._relay(step)
            self._shared.loop.later(_PROGRESS_S, lambda: self._show_progress(step))

    def _relay(self, step: _PreparationStep) -> None:
        answer = _content(step.answer)
        end = answer.rfind(b"\n") + 1
        for line in answer[step.read_bytes : end].splitlines():
            step.last_word = word = local.decode_of_maker(parse(line))
            if isinstance(word, local.MakerOutput):
                self._shared.channel.send(messages.Making(word.text))
        step.read_bytes = end

    def _maker_ended(self, step: _PreparationStep, status: int) -> StepFailed | None:
        self._relay(step)
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
        ended: Callable[[_PreparationStep, int], StepFailed | None],
        next_step: Callable[[], None],
    ) -> None:
        """Start a step. ``argv`` gets two descriptors: ``content``, and the answer."""
        task, answer = _file(content), _file(b"")
        step = self._step = _PreparationStep(name, answer)
        env = environment(self._shared.base, request.env)

        def on_end(status: int) -> None:
            step.failure = ended(step, status)
            os.close(answer)

        def on_output(tail: list[str]) -> None:
            if step.failure is not None and not step.closed:
                self._fail(step.name, step.failure, tail)
            elif not step.closed:
                next_step()

        try:
            step.program = HelperProgram(
                self._shared,
                "the preparation",
                SpawnedProgram(argv(task, answer), env, request.cwd),
                request.log,
                *(answer, task),
                on_end=on_end,
                on_output=on_output,
            )
        except SpawnError as error:
            os.close(answer)
            self._fail(name, StepFailed(str(error)))
        finally:
            os.close(task)

    def _done(self) -> None:
        self._shared.channel.send(messages.Prepared(self._python, self._environment))

    def _fail(self, step: str, failed: StepFailed, tail: Sequence[str] = ()) -> None:
        message = messages.Unprepared(failed.cause, failed.line, step, tuple(tail))
        self._shared.channel.send(message)

    def close(self) -> None:
        """End the processes that still run; their answers are no longer needed."""
        if self._step is not None and self._step.program is not None:
            self._step.closed = True
            self._step.program.send_group(signal.SIGKILL)

    @property
    def over(self) -> bool:
        return self._step is None or not self._step.running


def _content(file: int) -> bytes:
    return os.pread(file, _MAX_ANSWER_BYTES, 0)


def _file(content: bytes) -> int:
    descriptor = os.memfd_create("tfcluster")
    with open(descriptor, "wb", closefd=False) as stream:
        stream.write(content)
    return descriptor
