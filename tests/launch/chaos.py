"""Trials in which something is killed at some time; what they have in common.

TFCLUSTER_CHAOS_TRIALS says how many seeds are tried, TFCLUSTER_CHAOS_SEED with which
they begin: a failure names its own.
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
    """What was killed, and when; no pids: there was none of its kind."""

    what: str
    pids: tuple[int, ...]
    at_s: float

    def __str__(self) -> str:
        return f"{self.what} {list(self.pids)} at {self.at_s:.3f} s"


def seeds(trials: int) -> range:
    """Those to be tried; so many where nobody has said otherwise."""
    first = int(os.environ.get("TFCLUSTER_CHAOS_SEED", "0"))
    count = int(os.environ.get("TFCLUSTER_CHAOS_TRIALS", str(trials)))
    return range(first, first + count)


def strikes(
    rng: random.Random, longest_s: float, pick: Callable[[], tuple[str, list[int]]]
) -> Iterator[Strike]:
    """Kill what ``pick`` names then, once or twice within ``longest_s`` from now."""
    began = time.monotonic()
    count = rng.choice([1, 1, 2])
    for at_s in sorted(rng.uniform(0, longest_s) for _ in range(count)):
        time.sleep(max(0.0, began + at_s - time.monotonic()))
        what, pids = pick()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        yield Strike(what, tuple(pids), at_s)
