"""Turns signals to the launcher into items on its queue."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from types import FrameType

from tfcluster.base.errors import ExitCode
from tfcluster.lifecycle.events import Interrupted

_MEANING = {
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGHUP: ExitCode.HANGUP,
    signal.SIGUSR1: ExitCode.TIME_LIMIT,  # sbatch(1), --signal; s_rt of qsub(1)
    signal.SIGUSR2: ExitCode.TERMINATED,  # qsub(1), -notify: SIGKILL follows
}

_TWICE_S = 0.2


@contextmanager
def interrupts(
    post: Callable[[Interrupted], None], harmless: Container[int] = ()
) -> Iterator[None]:
    """Post signals while the run lasts, except those that are ignored (nohup).

    ``post`` must be safe in a signal handler. ``harmless`` signals have no effect.
    timeout(1) sends each signal twice, to us and to the process group: it counts once.
    """
    last: dict[int, float] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        is_twice = number != signal.SIGINT and now_s < last.get(number, 0.0) + _TWICE_S
        last[number] = now_s
        if number not in harmless and not is_twice:
            post(Interrupted(_MEANING[signal.Signals(number)]))

    before = {number: signal.getsignal(number) for number in _MEANING}
    for number, old in before.items():
        if old is not signal.SIG_IGN or number is signal.SIGINT:
            signal.signal(number, handle)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
