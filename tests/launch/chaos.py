"""Helpers for the chaos tests, which kill something at a random time.

TFCLUSTER_CHAOS_TRIALS sets the number of seeds, TFCLUSTER_CHAOS_SEED the first seed. A
failed test names its seed.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

# Each task has a child that ignores TERM, a daemon, and a daemon's child.
PROGRAM = """
import os, signal, time
def child(sessions, deaf):
    if os.fork():
        return
    for _ in range(sessions):
        os.setsid()
        if os.fork():
            os._exit(0)
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
child(0, True)
child(1, False)
child(2, True)
began = time.monotonic()
while time.monotonic() < began + 2.5:
    print('working', flush=True)
    time.sleep(0.05)
"""


@dataclass(frozen=True, slots=True)
class Strike:
    """What was killed, and when; ``pids`` is empty if no such process existed."""

    what: str
    pids: tuple[int, ...]
    at_s: float

    def __str__(self) -> str:
        return f"{self.what} {list(self.pids)} at {self.at_s:.3f} s"


def seeds(trials: int) -> range:
    """Return the seeds to try, ``trials`` by default."""
    first = int(os.environ.get("TFCLUSTER_CHAOS_SEED", "0"))
    count = int(os.environ.get("TFCLUSTER_CHAOS_TRIALS", str(trials)))
    return range(first, first + count)


def strikes(
    rng: random.Random, longest_s: float, pick: Callable[[], tuple[str, list[int]]]
) -> Iterator[Strike]:
    """Kill once or twice within ``longest_s``; ``pick`` chooses the victims."""
    began = time.monotonic()
    count = rng.choice([1, 1, 2])
    for at_s in sorted(rng.uniform(0, longest_s) for _ in range(count)):
        time.sleep(max(0.0, began + at_s - time.monotonic()))
        what, pids = pick()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        yield Strike(what, tuple(pids), at_s)
