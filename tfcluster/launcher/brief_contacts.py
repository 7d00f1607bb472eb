"""Agents that live only as long as a few questions, or the sweep of a host, take."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue

from tfcluster.base.errors import TfclusterError
from tfcluster.launcher.agent_connection import (
    FAN_OUT,
    HEARTBEAT_S,
    AgentConnection,
    ChannelReader,
    Closed,
    Opened,
    Received,
    Unopened,
    open_agent,
    open_all,
)
from tfcluster.plan.model import Host
from tfcluster.protocol.messages import Bye
from tfcluster.protocol.requests import Close, PingRequest, Request
from tfcluster.schedulers.starting import Starter

GREETING_S = 30.0
"""How long FAN_OUT hosts may take to answer before they count as silent."""
CLOSING_S = 5.0

Item = Received | Closed | Opened | Unopened


def greeting_s(count: int) -> float:
    """How long ``count`` hosts may take to answer."""
    return GREETING_S * -(-count // FAN_OUT)


class BriefContacts:
    """Opens agents, in a run named ``purpose``, and closes them. For one thread."""

    def __init__(self, starter: Starter, purpose: str) -> None:
        self._starter = starter
        self._run = f"{purpose}-{os.urandom(8).hex()}"
        self._reader = ChannelReader()
        self._items: SimpleQueue[Item] = SimpleQueue()
        self._contacts: dict[str, AgentConnection] = {}
        self._gone: set[str] = set()
        self._pinged_s = time.monotonic()

    def open(self, hosts: Sequence[Host]) -> None:
        """Start an agent on each host, FAN_OUT at a time; does not wait for them."""
        open_all(self._starter, hosts, self._open_one, self._items.put)

    def next(self, timeout_s: float) -> Item | None:
        """The next item; None: none in ``timeout_s``. Sends heartbeats when due."""
        now = time.monotonic()
        if now - self._pinged_s >= HEARTBEAT_S:
            self._pinged_s = now
            for contact in self._contacts.values():
                contact.send(PingRequest())  # agents exit if they receive nothing
        with contextlib.suppress(Empty):
            item = self._items.get(timeout=min(max(0.0, timeout_s), HEARTBEAT_S))
            if isinstance(item, Opened):
                self._contacts[item.host] = item.connection
            elif isinstance(item, Closed):
                self._gone.add(item.host)
            return item
        return None

    def send(self, host: str, request: Request) -> None:
        self._contacts[host].send(request)

    def close(self) -> None:
        for contact in self._contacts.values():
            contact.send(Close(0.0))
            contact.close()
        left = self._contacts.keys() - self._gone
        deadline = time.monotonic() + CLOSING_S
        with contextlib.suppress(Empty):
            while left:
                item = self._items.get(timeout=max(0.0, deadline - time.monotonic()))
                if isinstance(item, Closed):
                    left.discard(item.host)

    def _open_one(self, host: Host) -> AgentConnection:
        post, reader = self._items.put, self._reader
        return open_agent(self._starter, host, self._run, 0.0, post, reader)


SWEEP_S = 10.0
OTHERS_S = 7.0
"""The part of SWEEP_S in which the old agent may end its tasks itself."""
SWEEPERS = 3
"""How many agents a sweep tries: an agent may be killed like the one before it."""
SILENT_SWEEP_S = 2.0
"""Like SWEEP_S, for a host that has long been silent and will hardly answer now."""


def sweep_all(
    starter: Starter, hosts: Sequence[Host], run: str
) -> Iterator[tuple[str, int | TfclusterError | None]]:
    """Sweep hosts in parallel; yields their names with results or errors, in order."""
    # Imported here: it takes long, and a launch does not need it.
    from concurrent.futures import ThreadPoolExecutor

    reader = ChannelReader()

    def one(host: Host) -> int | TfclusterError | None:
        try:
            return sweep(starter, host, run, reader)
        except TfclusterError as error:
            return error

    with ThreadPoolExecutor(FAN_OUT) as pool:
        yield from zip([host.name for host in hosts], pool.map(one, hosts), strict=True)


class Cleanup:
    """Sweeps of lost hosts, each in its own thread."""

    def __init__(self, starter: Starter, run: str) -> None:
        self._starter = starter
        self._run = run
        self._reader = ChannelReader()
        self._threads: list[tuple[str, threading.Thread, float]] = []
        self.swept: dict[str, int] = {}
        """Host -> number of processes that were swept there."""

    def begin(self, host: Host, patience_s: float) -> None:
        """Start a sweep; ``wait`` waits at most ``patience_s`` from now for it."""
        thread = threading.Thread(
            target=self._sweep, args=(host,), name=f"sweep {host.name}", daemon=True
        )
        thread.start()
        until = time.monotonic() + patience_s
        self._threads.append((host.name, thread, until))

    def _sweep(self, host: Host) -> None:
        with contextlib.suppress(TfclusterError):
            count = sweep(self._starter, host, self._run, self._reader)
            if count is not None:
                self.swept[host.name] = count

    def wait(self) -> list[str]:
        """Wait for the sweeps; returns the hosts that could not be swept."""
        for _, thread, until in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return [name for name, _, _ in self._threads if name not in self.swept]


def sweep(starter: Starter, host: Host, run: str, reader: ChannelReader) -> int | None:
    """End all processes with the run's marks on ``host``; returns how many.

    None: no agent answered in time, or an older one lives. Raises StartError.
    """
    until = time.monotonic() + SWEEP_S
    for _ in range(SWEEPERS):
        count = _sweep_once(starter, host, run, until, reader)
        if count is not None or time.monotonic() >= until:
            return count
    return None


def _sweep_once(
    starter: Starter, host: Host, run: str, until: float, reader: ChannelReader
) -> int | None:
    over = threading.Event()
    counts: list[int] = []

    def listen(item: Received | Closed) -> None:
        if isinstance(item, Closed):
            over.set()
        elif isinstance(item.message, Bye):
            if not item.message.others:
                counts.append(item.message.swept)
            over.set()

    connection = open_agent(starter, host, run, 0.0, listen, reader)
    connection.listen()
    left_s = max(0.0, until - time.monotonic())
    connection.send(Close(0.0, others_s=min(OTHERS_S, left_s)))
    if not over.wait(left_s):
        connection.kill()
    connection.close()
    return counts[0] if counts else None
