"""A run, as Python programs see it."""

from __future__ import annotations

import html
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from tfcluster.api.launcher_child import LauncherChild
from tfcluster.base.errors import ConfigError, ExitCode, TfclusterError
from tfcluster.commands.record_query import follow_logs, log_files, one_run
from tfcluster.console.sanitise import sanitise, sanitise_word, settle
from tfcluster.console.screen import Screen
from tfcluster.console.views.progress import live_text
from tfcluster.console.views.status import status
from tfcluster.console.views.status import status as status_view
from tfcluster.documents.run import Status, TaskFailure
from tfcluster.record.continuation import latest
from tfcluster.record.logs import follow as follow_files
from tfcluster.record.paths import find, state_dir
from tfcluster.record.run_status import RunView

_SHOWN_LINES = 10


class Outcome(int):
    """The exit code with which ``tfcluster launch`` would exit, and the reason for it.

    It is an ``int``: ``sys.exit(run.wait())`` ends a script as the run ended, and 0 is
    success.
    """

    status: Status
    """The final state of the run."""

    def __new__(cls, status: Status) -> Outcome:
        outcome = super().__new__(cls, status["exit_code"] or 0)
        outcome.status = status
        return outcome

    def __reduce__(self) -> tuple[type[Outcome], tuple[Status]]:
        return Outcome, (self.status,)

    @property
    def exit_code(self) -> int:
        return int(self)

    @property
    def run(self) -> str:
        """The run id."""
        return self.status["run"]

    @property
    def state(self) -> str:
        """``succeeded``, ``failed``, ``stopped`` or ``lost``."""
        return self.status["state"]

    @property
    def succeeded(self) -> bool:
        return self.state == "succeeded"

    @property
    def first_failure(self) -> TaskFailure | None:
        return self.status["first_failure"]

    @property
    def cause(self) -> str | None:
        """Why the run did not succeed, in one sentence; None if unknown."""
        failure = self.first_failure
        return failure["cause"] if failure else self.status["reason"]

    def check(self) -> Outcome:
        """The outcome itself. Raises RunFailedError unless the run succeeded."""
        if not self.succeeded:
            raise RunFailedError(self)
        return self

    def __repr__(self) -> str:
        cause = f", cause={self.cause!r}" if self.cause else ""
        return f"Outcome(exit_code={int(self)}, state={self.state!r}{cause})"

    __str__ = __repr__


class RunFailedError(TfclusterError):
    """A run did not succeed; names the first failure and its task's last lines."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        super().__init__(
            "\n".join(_words(outcome)), hint=f"tfcluster logs {outcome.run}"
        )
        # A program may end with a code that has no name.
        self.exit_code = cast("ExitCode", int(outcome) or int(ExitCode.TASK_FAILED))

    def __reduce__(self) -> tuple[type[RunFailedError], tuple[Outcome]]:
        return RunFailedError, (self.outcome,)


def _words(outcome: Outcome) -> list[str]:
    failure = outcome.first_failure
    if failure is None:
        why = f": {outcome.cause}" if outcome.cause else ""
        return [f"{outcome.run} {_ended(outcome)}{why}"]
    place = " on ".join(filter(None, (failure["task"], failure["host"])))
    cause = sanitise_word(failure["cause"])
    tail = failure["log_tail"][-_SHOWN_LINES:]
    return [
        f"{outcome.run} {_ended(outcome)}: {place}: {cause}",
        *(f"    {sanitise_word(settle(line))}" for line in tail),
    ]


def _ended(outcome: Outcome) -> str:
    """``failed``, ``was stopped`` or ``was lost``."""
    return "failed" if outcome.state == "failed" else f"was {outcome.state}"


_POLL_S = 0.25
_BEGINNING_S = 20.0
"""How long the record of a new run may take to name its launcher."""


class LogLine(str):
    """A line that a task has written, without its newline."""

    task: str
    """The task, such as ``worker:0``."""

    def __new__(cls, text: str, task: str = "") -> LogLine:
        line = super().__new__(cls, text)
        line.task = task
        return line


class Run:
    """A run, from ``launch`` or ``attach``. Its methods may be called from any thread.

    As a context manager, it stops the run at the end of the block unless it is over.
    """

    def __init__(
        self,
        run: str | None,
        environ: Mapping[str, str] | None = None,
        child: LauncherChild | None = None,
    ) -> None:
        self._environ = dict(os.environ if environ is None else environ)
        self._paths = find(state_dir(self._environ), run)
        self._launched = child

    @property
    def _child(self) -> LauncherChild | None:
        """Our child, if we can wait for its end; otherwise only the record shows it."""
        launched = self._launched
        return launched if launched is not None and launched.is_ours else None

    @property
    def id(self) -> str:
        """The run id, such as ``digits-20261120-101500-3f2a``."""
        return self._paths.run

    @property
    def name(self) -> str:
        """The run's name, such as ``digits``."""
        return self._paths.name

    @property
    def folder(self) -> Path:
        """The folder of the run's record and logs."""
        return self._paths.root

    def status(self) -> Status:
        """The state of the run now: the document of ``tfcluster status RUN --json``.

        Raises ConfigError if the record was removed.
        """
        return self._view().to_json()

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """Wait until the run is over; returns its exit code and first failure.

        Raises TimeoutError if it is not over after ``timeout_s`` seconds; the run
        continues then, as it does if Ctrl-C interrupts the wait.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        child = self._child
        if child is not None and not child.wait(timeout_s):
            raise self._still_runs(timeout_s)
        while True:
            outcome = self._outcome()
            if outcome is not None:
                return outcome
            left_s = _POLL_S if until is None else until - time.monotonic()
            if left_s <= 0:
                raise self._still_runs(timeout_s)
            time.sleep(min(_POLL_S, left_s))

    def logs(
        self, task: str | None = None, *, follow: bool = False, last: int | None = None
    ) -> Iterator[LogLine]:
        """The lines that tasks have written; with ``follow``, until the run is over.

        ``task`` is a task (``worker:0``) or a type (``worker``); None means all tasks,
        and the line's ``task`` says which one wrote it. Each file is read from its
        beginning, or from its ``last`` lines on. Control characters are shown as
        ``\\x1b``; progress bars have their last state. Raises ConfigError if there is
        no such task.
        """
        wanted = () if task is None else (task,)
        _, files = log_files(self.id, wanted, self._environ)
        # A separate generator, so that this call already refuses a wrong task.
        return self._lines(files, follow=follow, last=last)

    def _lines(
        self, files: Mapping[str, Path], *, follow: bool, last: int | None
    ) -> Iterator[LogLine]:
        if follow:
            batches = follow_logs(self._paths, files, last)
        else:
            over = threading.Event()
            over.set()
            batches = follow_files(files, over, last=last)
        for task, lines in batches:
            for line in lines:
                yield LogLine(sanitise(settle(line)), task)

    def stop(self, *, now: bool = False) -> Outcome:
        """Stop the run, as ``tfcluster stop`` does, and wait until it is over.

        Tasks get SIGTERM and the run's grace period; ``now`` kills them. A run that is
        over stays as it is. Raises ContactLostError if the run does not stop or its
        launcher, on another host, cannot be reached.
        """
        from tfcluster.commands.stop import stop  # imports all backends

        self._await_launcher()
        stop(self.id, now=now, environ=self._environ, say=lambda text: None)
        return self.wait()

    def report(self, file: str | os.PathLike[str] | None = None) -> Path:
        """Write the report of ``tfcluster report``, one HTML file; returns its path.

        The default is ``RUN-report.html`` in the current folder. The run need not be
        over. Raises ConfigError without matplotlib (``pip install
        'tfcluster[report]'``), ResourceError if the file cannot be written.
        """
        from tfcluster.commands.report_trace import default_name, write_report

        path = Path(default_name(self.id) if file is None else file)
        return write_report(self.id, path, self._environ)

    def watch(self, *, refresh_s: float = 1.0) -> Outcome:
        """Show the run's state until it is over; returns as ``wait`` does.

        In a notebook or a terminal, the view is redrawn every ``refresh_s`` seconds.
        Elsewhere, a line is printed now and then if something has changed. Ctrl-C ends
        the view; the run continues.
        """

        with live_view() as show:
            while not (view := self._view()).state.final:
                show(view)
                if (child := self._child) is not None:
                    child.wait(refresh_s)
                else:
                    time.sleep(refresh_s)
            show(view)
        return self.wait()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        if self._outcome() is None:
            self.stop()

    def __repr__(self) -> str:
        try:
            state = str(self._view().state)
        except ConfigError:
            state = "its record was removed"
        return f"<tfcluster.Run {self.id}: {state}>"

    def _repr_html_(self) -> str:
        """What a notebook shows if a run is the last value of a cell."""
        try:
            lines = status_view(self._view(), time.time())
        except ConfigError:
            lines = [repr(self)]
        return f"<pre>{html.escape(chr(10).join(lines))}</pre>"

    def _view(self) -> RunView:
        return one_run(self.id, self._environ)

    def _outcome(self) -> Outcome | None:
        """How the run ended; None if it is not over.

        If the scheduler has started a job again, the job continues as another run.
        """
        paths = self._paths
        if paths.job.exists():
            paths = latest(paths)
        view = one_run(paths.run, self._environ)
        over = view.state.final and not view.awaits_another_start
        return Outcome(view.to_json()) if over else None

    def _await_launcher(self) -> None:
        """Wait until a run that has just begun can be stopped."""
        until = time.monotonic() + _BEGINNING_S
        child = self._child
        while child is not None and time.monotonic() < until:
            view = self._view()
            begun = view.launcher is not None or self._paths.job.exists()
            if begun or view.state.final or child.wait(_POLL_S / 5):
                return

    def _still_runs(self, timeout_s: float | None) -> TimeoutError:
        return TimeoutError(f"{self.id} is not over after {timeout_s:g} s")


_CLOSE_S = 5.0


@contextmanager
def live_view() -> Iterator[Callable[[RunView], None]]:
    """A function that shows the state of a run in place of the previous state."""
    # A kernel of IPython can redraw the output of a cell.
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None and hasattr(shell, "kernel"):
        yield _Notebook().show
        return
    screen = Screen(None, sys.stdout, environ=os.environ)

    def show(view: RunView) -> None:
        if not view.state.final:
            screen.live(live_text(view, time.time()))
            return
        screen.live(None)
        screen.show(status(view, time.time(), screen.style))

    try:
        yield show
    finally:
        screen.close(_CLOSE_S)


class _Notebook:
    """One output of a cell, which is redrawn."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, view: RunView) -> None:
        text = "\n".join(status(view, time.time()))
        shown = {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}
        if self._handle is not None:
            self._handle.update(shown, raw=True)
            return
        # Not an import statement: the notebook has already loaded IPython.
        display = importlib.import_module("IPython.display").display
        self._handle = display(shown, raw=True, display_id=True)
