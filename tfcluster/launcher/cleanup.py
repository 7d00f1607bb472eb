"""Sweeping a host of what a run left there, by way of a fresh agent."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from tfcluster.backends.base import Starter
from tfcluster.errors import TfclusterError
from tfcluster.launcher.agent_connection import Closed, Received, open_agent
from tfcluster.model import Host

SWEEP_S = 10.0
OTHERS_S = 7.0
"""Of that, how long the old agent is left to end what it supervises."""
SWEEPERS = 3
"""How many agents are sent for a sweep: one may be killed like the one before it."""
SILENT_SWEEP_S = 2.0
"""The same for a host that has long been silent: it will hardly answer now."""
FAN_OUT = 32
"""How many hosts are connected to at a time."""


def sweep_all(
    starter: Starter, hosts: Sequence[Host], run: str
) -> Iterator[tuple[str, int | TfclusterError | None]]:
    """``sweep`` on several hosts at a time; how it went on each, in their order."""

    def one(host: Host) -> int | TfclusterError | None:
        try:
            return sweep(starter, host, run)
        except TfclusterError as error:
            return error

    with ThreadPoolExecutor(FAN_OUT) as pool:
        yield from zip([host.name for host in hosts], pool.map(one, hosts), strict=True)


class Cleanup:
    """Sweeps of lost hosts, each in a thread."""

    def __init__(self, starter: Starter, run: str) -> None:
        self._starter = starter
        self._run = run
        self._threads: list[tuple[str, threading.Thread, float]] = []
        self.swept: dict[str, int] = {}
        """Hosts, and how many processes were swept there."""

    def begin(self, host: Host, patience_s: float) -> None:
        """``wait`` will not wait for this one for longer than that from now."""
        thread = threading.Thread(
            target=self._sweep, args=(host,), name=f"sweep {host.name}", daemon=True
        )
        thread.start()
        until = time.monotonic() + patience_s
        self._threads.append((host.name, thread, until))

    def _sweep(self, host: Host) -> None:
        with contextlib.suppress(TfclusterError):
            count = sweep(self._starter, host, self._run)
            if count is not None:
                self.swept[host.name] = count

    def wait(self) -> list[str]:
        """Hosts that could not be swept."""
        for _, thread, until in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return [name for name, _, _ in self._threads if name not in self.swept]


def sweep(starter: Starter, host: Host, run: str) -> int | None:
    """End what carries the run's marker on ``host``; how many that were.

    None where no agent answered in time, or where an older one lives on and still has
    processes. Raises HostError or StartError.
    """
    until = time.monotonic() + SWEEP_S
    for _ in range(SWEEPERS):
        count = _sweep_once(starter, host, run, until)
        if count is not None or time.monotonic() >= until:
            return count
    return None


def _sweep_once(starter: Starter, host: Host, run: str, until: float) -> int | None:
    over = threading.Event()
    counts: list[int] = []

    def listen(item: Received | Closed) -> None:
        if isinstance(item, Closed):
            over.set()
        elif item.frame["type"] == "bye":
            count = item.frame.get("swept")
            if not item.frame.get("others"):
                counts.append(count if isinstance(count, int) else 0)
            over.set()

    contact = open_agent(starter, host, run, 0.0, listen)
    left_s = max(0.0, until - time.monotonic())
    others_s = min(OTHERS_S, left_s)
    contact.send({"type": "close", "grace_s": 0, "others_s": others_s})
    if not over.wait(left_s):
        contact.kill()
    contact.close()
    return counts[0] if counts else None
