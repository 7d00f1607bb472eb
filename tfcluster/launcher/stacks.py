"""When training stalls, asks the tasks for their stacks and names the culprits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from tfcluster.base.task_id import TaskId
from tfcluster.launcher.live_run import Journal, LiveRun
from tfcluster.launcher.progress import STACKS_WAIT_S, blame
from tfcluster.lifecycle.events import Stalled
from tfcluster.protocol.requests import Request, StacksRequest
from tfcluster.protocol.task_events import Stack


class StallDetector:
    """Detects stalls; ``send`` asks tasks, ``answers`` receives their answers."""

    def __init__(
        self,
        run: LiveRun,
        answers: dict[TaskId, Stack],
        send: Callable[[str, Request], None],
    ) -> None:
        self._run = run
        self._progress = run.progress
        self._answers = answers
        self._send = send
        self._asked: tuple[TaskId, ...] = ()
        self._asked_until = 0.0

    def check(
        self, now: float, running: Mapping[TaskId, str], *, well: bool
    ) -> Stalled | None:
        """Ask for stacks if tasks (task -> host) stall; later returns the verdict."""
        expected = {
            task: host
            for task, host in running.items()
            if self._progress.is_expected_of(task)
        }
        if self._asked:
            missing = any(task not in self._answers for task in expected)
            if missing and now < self._asked_until:
                return None
            job = self._run.job
            timeout_s = job.description.progress_timeout_s or 0.0
            verdict = blame(self._asked, self._answers, job.ranks(), timeout_s)
            self._asked = ()
            self._progress.unwatch()
            return verdict
        stalled = self._progress.stalled(now) if well else ()
        if stalled:
            self._asked, self._asked_until = stalled, now + STACKS_WAIT_S
            self._answers.clear()
            _request_stacks(expected, self._send)
        return None


def ask_stacks(
    number: str,
    tasks: Collection[str],
    running: Mapping[TaskId, str],
    send: Callable[[str, Request], None],
    journal: Journal,
) -> None:
    """Ask these running tasks, or all; events ``asked`` and ``stack`` follow."""
    chosen = {t: host for t, host in running.items() if not tasks or str(t) in tasks}
    journal.event("asked", request=number, tasks=sorted(map(str, chosen)))
    _request_stacks(chosen, send)


def _request_stacks(
    tasks: Mapping[TaskId, str], send: Callable[[str, Request], None]
) -> None:
    for task, host in tasks.items():
        send(host, StacksRequest((str(task),)))
