"""The command ``attach``: follow a run as ``launch`` shows it, without driving it."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tfcluster.base.errors import ExitCode
from tfcluster.console.display import DEFAULT, Display
from tfcluster.console.output import say
from tfcluster.record.continuation import latest
from tfcluster.record.load_run import read_run
from tfcluster.record.paths import RunPaths, find, state_dir
from tfcluster.record.run_status import RunView
from tfcluster.submit.follow import RunWatch
from tfcluster.submit.follow import follow as follow_job
from tfcluster.submit.job import find_job

_LINES = 10
"""How many of each task's earlier lines are shown."""
_LOOK_S = 0.25
_CLOSE_S = 5.0


def attach(
    run: str | None, environ: Mapping[str, str], display: Display = DEFAULT
) -> int:
    """Show a run until it is over; returns its exit code, or 130 after Ctrl-C."""
    first = find(state_dir(environ), run)
    paths = latest(first)
    if paths != first:
        say(f"{first.run} continues as {paths.run}")
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


class _Follower(RunWatch):
    def run(self) -> int:
        self._notes = len(self._view.notes)
        try:
            if not self._quiet:
                self._screen.say(f"run {self._paths.run}")
            self._show_logs(_LINES)
            self._show_notes()
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
        if self._view.state.final:
            return True
        time.sleep(timeout or 0)  # other processes write the files
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._view = self._read()
            self._show_notes()
            if not self._view.state.final:
                self._show.live(lambda: self._view, now_s)
        return self._view.state.final
