"""Agents on many hosts that live only as long as a few questions take."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue

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
        self._ping()
        with contextlib.suppress(Empty):
            item = self._items.get(timeout=min(max(0.0, timeout_s), HEARTBEAT_S))
            if isinstance(item, Opened):
                self._contacts[item.host] = item.connection
            elif isinstance(item, Closed):
                self._gone.add(item.host)
            return item
        return None

    def send(self, host: str, request: Request) -> None:
        """Queue a request for a host that is open."""
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

    def _ping(self) -> None:
        """Send heartbeats: agents exit if they receive nothing for too long."""
        now = time.monotonic()
        if now - self._pinged_s >= HEARTBEAT_S:
            self._pinged_s = now
            for contact in self._contacts.values():
                contact.send(PingRequest())
