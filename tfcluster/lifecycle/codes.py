"""Derives the exit code of a run from the exit codes of its tasks. Pure."""

from __future__ import annotations

from collections.abc import Collection

from tfcluster.errors import ExitCode

_FIRST_OF_SIGNALS = 128
"""A shell's exit code of this or more means that a signal killed its command."""

_ACTED_UPON = frozenset({ExitCode.PREEMPTED, 99, 100, ExitCode.TIME_LIMIT, 126, 127})
"""Codes that make schedulers and scripts requeue or give up; never passed on.

75: preempted; 99: Grid Engine requeues the job; 100: Grid Engine puts the job into the
error state; 124: time limit; 126, 127: a shell could not execute its command.
"""


def run_code(codes: Collection[int | None]) -> int:
    """The tasks' own exit code if there is only one and it can be passed on, else 1."""
    if len(codes) != 1:
        return ExitCode.TASK_FAILED
    (code,) = codes
    if not code or code in _ACTED_UPON or code >= _FIRST_OF_SIGNALS:
        return ExitCode.TASK_FAILED
    return code
