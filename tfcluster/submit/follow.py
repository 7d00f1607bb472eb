"""Follows a submitted job from the queue to the end of its run.

While the job is queued, everything shown comes from the scheduler; afterwards, from the
run's record and logs. The launcher in the job does not know its followers.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from queue import Empty, SimpleQueue

from tfcluster.base.errors import ExitCode
from tfcluster.base.light_dataclasses import replace
from tfcluster.base.states import RunState, TaskState
from tfcluster.base.task_id import TaskId
from tfcluster.console.display import DEFAULT, Display
from tfcluster.console.output import say
from tfcluster.console.sanitise import sanitise
from tfcluster.console.screen import Screen
from tfcluster.console.views.failures import failure
from tfcluster.launcher.interrupts import interrupts
from tfcluster.launcher.run_output import RunOutput
from tfcluster.lifecycle.events import Interrupted
from tfcluster.record.continuation import first, successor
from tfcluster.record.files import read_json
from tfcluster.record.load_run import RunReader, gpus_of_tasks
from tfcluster.record.logs import follow as follow_files
from tfcluster.record.paths import RunPaths
from tfcluster.record.run_status import RunView
from tfcluster.schedulers.base import Ask, JobPhase, JobState, asker
from tfcluster.submit.job import QueuedJob, forget_secrets
from tfcluster.submit.job_status import (
    SETTLING_S,
    ask_state,
    cancel,
    ended,
    sentence,
    settle,
    still_there,
)

LOOK_S = 0.5
ASK_S = 2.0
ASK_RUNNING_S = 30.0
"""The interval of queries to the controller while the run has a record: long."""
_CLOSE_S = 5.0
_ALL_LINES = 1_000_000
_BY_SCHEDULER = (ExitCode.TIME_LIMIT, ExitCode.PREEMPTED)


def follow(
    job: QueuedJob,
    environ: Mapping[str, str],
    display: Display = DEFAULT,
    *,
    stays: bool = False,
    last: int = _ALL_LINES,
) -> int:
    """Follow the job until its run is over; returns the run's exit code.

    Ctrl-C cancels the job, unless it ``stays``; if the terminal hangs up, the job
    continues. Shows the ``last`` lines of what each task has printed before.
    """
    with ExitStack() as stack:
        signals: list[Interrupted] = []
        stack.enter_context(interrupts(signals.append))
        while True:
            watch = _JobWatch(
                job, asker(environ), environ, display, signals, stays, last
            )
            code = watch.run()
            again = watch.requeued()
            if again is None:
                return code if watch.left is None else watch.left
            job = again


class RunWatch:
    """A run on the screen, whose state is read between reads of its logs."""

    def __init__(
        self, paths: RunPaths, environ: Mapping[str, str], display: Display
    ) -> None:
        plan = read_json(paths.plan) or {}
        tasks = [TaskId.parse(entry["task"]) for entry in plan.get("tasks", ())]
        self._paths = paths
        self._files = {str(task): paths.log(task) for task in tasks}
        self._quiet = display.quiet
        self._screen = Screen(
            sys.stdout, sys.stderr, environ=environ, tasks=self._files, display=display
        )
        self._show = RunOutput(
            self._screen,
            environ,
            display,
            tasks=self._files,
            has_gpus=gpus_of_tasks(paths),
        )
        self._reader = RunReader(paths)
        self._view = self._read()
        self._notes = 0
        self._looked_s = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        """Check the run; True once it is over. ``record.logs.follow`` calls this."""
        raise NotImplementedError

    def _read(self) -> RunView:
        return self._reader.read(now_s=time.time())

    def _show_logs(self, last: int) -> None:
        """Show the ``last`` lines of each task, and new ones until ``wait`` is True."""
        for task, lines in follow_files(self._files, self, last=last):
            self._show.log(task, lines, 0)

    def _show_notes(self) -> None:
        for note in self._view.notes[self._notes :]:
            self._screen.say(note)
        self._notes = len(self._view.notes)


class _JobWatch(RunWatch):
    def __init__(
        self,
        job: QueuedJob,
        ask: Ask,
        environ: Mapping[str, str],
        display: Display,
        signals: list[Interrupted],
        stays: bool,
        last: int,
    ) -> None:
        super().__init__(job.paths, environ, display)
        self._job = job
        self._stays = stays
        self._last = last
        self._ask = ask
        self._signals = signals
        self._heard = 0
        self.left: ExitCode | None = None
        """The exit code if the user has left or cancelled the job."""
        self._inquiry = _Inquiry(job, ask)
        self._complaints: SimpleQueue[str | None] = SimpleQueue()
        self._asked = -ASK_RUNNING_S
        self._silent = False
        """Whether the scheduler did not answer the last question."""
        self._over_since: float | None = None
        self._began = time.monotonic()

    def run(self) -> int:
        try:
            if not self._quiet:
                self._screen.say(f"run {self._paths.run}")
                self._screen.say(f"job {self._job.id}")
            self._show_logs(self._last)
            if self.left is not None:
                self._screen.live(None)
                return self.left
            self._end()
            return self._view.exit_code or 0
        finally:
            self._screen.close(_CLOSE_S)

    def _end(self) -> None:
        if any(task.state is not TaskState.PENDING for task in self._view.tasks):
            self._show.end(self._view)
            if self._view.state is RunState.LOST and self._view.reason:
                self._screen.say(f"lost: {self._view.reason}")
            elif self._view.exit_code in _BY_SCHEDULER and self._view.reason:
                self._screen.say(self._view.reason)
            return
        self._screen.live(None)
        if self._view.first_failure is not None:
            self._screen.show(failure(self._view, self._screen.style))
        elif self._view.reason:
            self._screen.say(self._view.reason)

    def wait(self, timeout: float | None = None) -> bool:
        time.sleep(timeout or 0)  # other processes write the files
        self._listen()
        now = time.monotonic()
        if now - self._looked_s >= LOOK_S:
            self._looked_s = now
            self._check(now)
        return self._view.state.final or self.left is not None

    def requeued(self) -> QueuedJob | None:
        lost = self._view.state is RunState.LOST and not self._heard
        preempted = self._view.exit_code == ExitCode.PREEMPTED
        waits = preempted or self._view.requeued
        if self.left is not None or not (lost or waits):
            return None
        began, shown = time.monotonic(), False
        while True:
            state = self._inquiry.ask(ASK_S)
            if state is not None:
                time.sleep(LOOK_S)
            phase = None if state is None else state.phase
            following = successor(self._job.paths)
            if following is not None:
                return replace(self._job, paths=following)
            for signal in self._signals[self._heard :]:
                self.left = signal.exit_code
                if signal.exit_code is not ExitCode.HANGUP and not self._stays:
                    _say(f"cancelling job {self._job.id}")
                    cancel(self._job, self._ask, now=True)
                    forget_secrets(first(self._job.paths))
                return None
            if phase is not None and phase.ended:
                return None
            if state is not None and phase is JobPhase.PENDING and not shown:
                waits = shown = True
                _say(f"{sentence(self._job, state)}; it will start again")
            if not waits and time.monotonic() - began >= SETTLING_S:
                _say(still_there(self._job))
                return None

    def _listen(self) -> None:
        """Handle Ctrl-C: cancel in order, then at once, then leave."""
        for signal in self._signals[self._heard :]:
            self._heard += 1
            leaves = self._stays or self._heard > 2
            if signal.exit_code is ExitCode.HANGUP or leaves:
                self.left = signal.exit_code
                return
            word = "cancelling" if self._heard == 1 else "killing"
            self._screen.say(f"{word} job {self._job.id}")
            now = self._heard > 1
            threading.Thread(target=self._cancel, args=(now,), daemon=True).start()
        with suppress(Empty):
            if complaint := self._complaints.get_nowait():
                self._screen.say(f"job {self._job.id} was not cancelled: {complaint}")
            self._asked = -ASK_RUNNING_S

    def _cancel(self, now: bool) -> None:
        """Cancel the job, in the background: the scheduler may hang."""
        self._complaints.put(cancel(self._job, self._ask, now=now))

    def _check(self, now: float) -> None:
        self._view = self._read()
        if self._view.state.final:
            return
        begun = self._view.launcher is not None
        pause_s = ASK_RUNNING_S if begun else ASK_S
        if self._inquiry.is_open or now - self._asked >= pause_s:
            state = self._inquiry.ask()
            if state is not None:
                self._asked = now
                self._weigh(state, now, begun=begun)
        if begun:
            self._show_notes()
            self._show.live(lambda: self._view, now)

    def _weigh(self, state: JobState, now: float, *, begun: bool) -> None:
        """Show the job's state; end the run if the job is over."""
        silent = state.phase is JobPhase.UNKNOWN
        if silent and not self._silent:
            self._screen.say(f"the scheduler does not answer: {state.reason}")
        if self._silent and not silent:
            self._screen.say("the scheduler answers again")
        self._silent = silent
        if silent:
            return
        again = begun and state.phase is JobPhase.PENDING
        if not again and not state.phase.ended:
            self._over_since = None
            if not begun and not self._quiet:
                waited_s = now - self._began
                self._screen.live(sentence(self._job, state, since_s=waited_s))
            return
        if self._over_since is None:
            self._over_since = now
        self._asked = now - ASK_RUNNING_S + ASK_S
        # If there was a launcher, its last events may still be on their way.
        patience_s = SETTLING_S if begun else ASK_S
        if now - self._over_since >= patience_s or (self._heard and not begun):
            self._settle(state)

    def _settle(self, state: JobState) -> None:
        if self._heard:
            code, word = self._signals[0].exit_code, RunState.STOPPED
            settle(self._job.paths, word, code, f"job {self._job.id} was cancelled")
        elif self._view.launcher is None:
            why = ended(self._job, state)
            settle(self._job.paths, RunState.FAILED, ExitCode.START, why)
        elif state.phase is JobPhase.PENDING:
            why = f"its host was lost: {sentence(self._job, state)}"
            settle(self._job.paths, RunState.LOST, ExitCode.PREEMPTED, why)
        else:
            why = ended(self._job, state)
            settle(self._job.paths, RunState.LOST, ExitCode.CONTACT_LOST, why)
        self._view = self._read()


def _say(text: str) -> None:
    """Show a message after the screen has been closed."""
    say(sanitise(text))


class _Inquiry:
    """Asks for a job's state in the background, only once at a time."""

    def __init__(self, job: QueuedJob, ask: Ask) -> None:
        self._question = lambda: self._answers.put(ask_state(job, ask))
        self._answers: SimpleQueue[JobState] = SimpleQueue()
        self.is_open = False

    def ask(self, timeout_s: float = 0.0) -> JobState | None:
        if not self.is_open:
            self.is_open = True
            # A daemon thread: the exit does not wait for an answer.
            threading.Thread(target=self._question, name="inquiry", daemon=True).start()
        with suppress(Empty):
            state = self._answers.get(timeout_s > 0, timeout_s)
            self.is_open = False
            return state
        return None
