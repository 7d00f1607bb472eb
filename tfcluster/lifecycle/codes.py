"""Which exit code of its tasks is that of the whole run. Pure."""

from __future__ import annotations

from collections.abc import Collection

from tfcluster.errors import ExitCode

_FIRST_OF_SIGNALS = 128
"""A shell says with these that a signal has killed its command."""

_ACTED_UPON = frozenset({ExitCode.PREEMPTED, 99, 100, ExitCode.TIME_LIMIT, 126, 127})
"""Schedulers and scripts requeue or give up by these, so they are never a task's own.

75: preempted; 99 and 100: Grid Engine queues the job again, or puts it into error
state; 124: time limit; 126, 127: a shell could not execute its command.
"""


def run_code(codes: Collection[int | None]) -> int:
    """The tasks' own exit code where only one occurred and it can be passed on."""
    if len(codes) != 1:
        return ExitCode.TASK_FAILED
    (code,) = codes
    if not code or code in _ACTED_UPON or code >= _FIRST_OF_SIGNALS:
        return ExitCode.TASK_FAILED
    return code
