"""The command ``attach``: follow a run as ``launch`` shows it, without driving it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping

from tfcluster.commands.record_query import log_files
from tfcluster.console.display import DEFAULT, Display
from tfcluster.console.output import say
from tfcluster.console.screen import Screen
from tfcluster.errors import ExitCode
from tfcluster.launcher.run_output import RunOutput
from tfcluster.record.continuation import latest
from tfcluster.record.load_run import RunReader, read_run
from tfcluster.record.logs import follow as follow_files
from tfcluster.record.paths import RunPaths, find, state_dir
from tfcluster.record.run_status import RunView
from tfcluster.record.task_gpus import gpus_of_tasks
from tfcluster.submit.follow import follow as follow_job
from tfcluster.submit.job import find_job

_LINES = 10
"""How many of each task's earlier lines are shown."""
_LOOK_S = 0.25
_CLOSE_S = 5.0


def attach(
    run: str | None, environ: Mapping[str, str], display: Display = DEFAULT
) -> int:
    """Show output and progress of a run until it is over; returns its exit code.

    Ctrl-C ends only this command, with exit code 130. Raises TfclusterError.
    """
    found = find(state_dir(environ), run)
    paths = latest(found)
    if paths != found:
        say(f"{found.run} continues as {paths.run}")
    view = _read(paths)
    over = view.state.final and not view.awaits_another_start
    if not over and (job := find_job(paths)) is not None:
        code = follow_job(job, environ, display, stays=True, last=_LINES)
    else:
        code = _Follower(paths, environ, display).run()
    if code == ExitCode.INTERRUPTED and not _read(paths).state.final:
        say(f"{paths.run} continues; `tfcluster stop {paths.run}` stops it")
    return code


def _read(paths: RunPaths) -> RunView:
    return read_run(paths, now_s=time.time())


class _Follower:
    """Follows a run that has a launcher, or shows how it ended."""

    def __init__(
        self, paths: RunPaths, environ: Mapping[str, str], display: Display
    ) -> None:
        _, self._files = log_files(paths.run, (), environ)
        self._paths = paths
        self._reader = RunReader(paths)
        self._screen = Screen(
            sys.stdout,
            sys.stderr,
            environ=environ,
            tasks=self._files,
            display=display,
        )
        self._quiet = display.quiet
        self._show = RunOutput(
            self._screen,
            environ,
            display,
            tasks=self._files,
            has_gpus=gpus_of_tasks(paths),
        )
        self._view = self._read()
        self._notes = len(self._view.notes)
        self._never = threading.Event()
        self._looked_s = 0.0

    def run(self) -> int:
        try:
            if not self._quiet:
                self._screen.say(f"run {self._paths.run}")
            for task, lines in follow_files(self._files, self, last=_LINES):
                self._show.log(task, lines, 0)
            self._news()
            self._show.end(self._view)
            if self._view.reason:
                self._screen.say(f"{self._view.state}: {self._view.reason}")
            return self._view.exit_code or 0
        except KeyboardInterrupt:
            self._screen.live(None)
            return ExitCode.INTERRUPTED
        finally:
            self._screen.close(_CLOSE_S)

    def wait(self, timeout: float | None = None) -> bool:
        """Check the run; True once it is over. ``record.logs.follow`` calls this."""
        if self._view.state.final:
            return True
        self._never.wait(timeout)
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._view = self._read()
            self._news()
            if not self._view.state.final:
                self._show.live(lambda: self._view, now_s)
        return self._view.state.final

    def _read(self) -> RunView:
        return self._reader.read(now_s=time.time())

    def _news(self) -> None:
        for note in self._view.notes[self._notes :]:
            self._screen.say(note)
        self._notes = len(self._view.notes)
