"""Kills processes repeatedly until none is left, or gives up after a while.

Knows neither tasks nor runs: the caller finds the processes to kill.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from tfcluster.agent.constants import SWEEP_INTERVAL_S, SWEEP_S
from tfcluster.agent.loop import Loop
from tfcluster.agent.proc import ProcessEntry
from tfcluster.agent.signals import send


def kill_until_gone(
    loop: Loop,
    find: Callable[[], list[ProcessEntry]],
    done: Callable[[list[ProcessEntry], list[ProcessEntry]], None],
) -> None:
    """SIGKILL what ``find`` returns until it returns nothing, for at most ``SWEEP_S``.

    ``done`` is called with all killed processes and with those that are still alive.
    Killing is repeated because a process may fork between ``find`` and the signal.
    """
    deadline = loop.now() + SWEEP_S
    killed: dict[int, ProcessEntry] = {}

    def step() -> None:
        alive = find()
        for process in alive:
            send(process, signal.SIGKILL)
            killed[process.pid] = process
        if alive and loop.now() < deadline:
            loop.later(SWEEP_INTERVAL_S, step)
        else:
            done(list(killed.values()), alive)

    step()
