"""Fetches results after the run is over, through new agents on its hosts."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tfcluster.errors import TfclusterError
from tfcluster.launcher.agent_connection import (
    HEARTBEAT_S,
    AgentConnection,
    Closed,
    Received,
    open_agent,
)
from tfcluster.launcher.channel_threads import ChannelThreads
from tfcluster.launcher.result_placement import ResultFolder
from tfcluster.launcher.result_transfer import (
    HostTransfer,
    Inbox,
    TransferOutcome,
    WantedFiles,
    run_all,
)
from tfcluster.launcher.results import AT_ONCE
from tfcluster.launcher.workdir_listing import witnesses
from tfcluster.model import Description, Host
from tfcluster.protocol.messages import Bye, Fault, OfResults
from tfcluster.protocol.requests import Close, Ping, Request
from tfcluster.record.paths import RunPaths
from tfcluster.schedulers.starting import Starter

_POLL_S = 0.1
_CLOSE_S = 5.0
"""How long agents may take to end."""


def fetch_late(
    description: Description,
    paths: RunPaths,
    hosts: Sequence[Host],
    starter: Starter,
    patterns: tuple[str, ...],
    *,
    apart: bool,
    force: bool,
    show: Callable[[Mapping[str, TransferOutcome]], None],
) -> list[tuple[TransferOutcome, TfclusterError | None]]:
    """Fetch from hosts whose run is over; an error says why a host was not reached.

    ``show`` is called now and then with the outcomes so far.
    """
    numbers = itertools.count(1)
    root = description.workdir
    seen, sync = witnesses(root), description.sync
    wanted = WantedFiles(str(root) if sync is None else sync.folder, seen, patterns)
    outcomes = {host.name: TransferOutcome(host.name) for host in hosts}
    threads = ChannelThreads()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        opened = list(pool.map(lambda host: _Line.open(starter, host, threads), hosts))
    lines = [line for line in opened if isinstance(line, _Line)]
    transfers = [
        HostTransfer(
            outcomes[line.host],
            wanted,
            ResultFolder(Path(root), line.host, force=force, apart=apart),
            send=line.send,
            inbox=line.inbox,
            numbers=numbers,
            stopped=lambda: None,
        )
        for line in lines
    ]
    thread = threading.Thread(target=run_all, args=(transfers, AT_ONCE), daemon=True)
    thread.start()
    try:
        _attend(thread, lines, lambda: show(outcomes))
    finally:
        _end(lines)
    result: list[tuple[TransferOutcome, TfclusterError | None]] = []
    for host, line in zip(hosts, opened, strict=True):
        outcome = outcomes[host.name]
        error = line if isinstance(line, TfclusterError) else None
        if error is not None:
            outcome.cause, outcome.over = error.message, True
        result.append((outcome, error))
    return result


def _attend(
    thread: threading.Thread, lines: Sequence[_Line], show: Callable[[], None]
) -> None:
    """Wait for the fetch, and send heartbeats, without which the agents would exit."""
    pinged_s = time.monotonic()
    while thread.is_alive():
        thread.join(_POLL_S)
        show()
        if time.monotonic() - pinged_s >= HEARTBEAT_S:
            pinged_s = time.monotonic()
            for line in lines:
                line.send(Ping())


def _end(lines: Sequence[_Line]) -> None:
    for line in lines:
        line.send(Close(0.0))
    until_s = time.monotonic() + _CLOSE_S
    for line in lines:
        line.closed.wait(max(0.0, until_s - time.monotonic()))
        line.contact.close()


class _Line:
    """The connection to a new agent on one host."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.inbox = Inbox()
        self.closed = threading.Event()
        self.contact: AgentConnection

    @classmethod
    def open(
        cls, starter: Starter, host: Host, threads: ChannelThreads
    ) -> _Line | TfclusterError:
        line = cls(host.name)
        # Not the id of the run: this agent must not end any processes of the run that
        # are left.
        mark = f"fetch-{os.urandom(8).hex()}"
        try:
            line.contact = open_agent(starter, host, mark, 0.0, line.post, threads)
        except TfclusterError as error:
            return error
        line.contact.listen()
        return line

    def send(self, request: Request) -> None:
        self.contact.send(request)

    def post(self, item: Received | Closed) -> None:
        """Called from the connection's thread."""
        if isinstance(item, Closed):
            self.inbox.end(item.cause)
            self.closed.set()
            return
        match item.message:
            case Fault(cause):
                self.inbox.end(cause)
            case Bye():
                self.closed.set()
            case OfResults() as message:
                self.inbox.put(message)
