"""Opens agents on many hosts, a limited number at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from tfcluster.model import Host
from tfcluster.schedulers.starting import Starter, StartsTogether

FAN_OUT = 32
"""How many hosts are connected to in parallel."""


def open_all(
    starter: Starter, hosts: Sequence[Host], open_one: Callable[[Host], None]
) -> None:
    """Call ``open_one`` for each host, in FAN_OUT threads; does not wait for them.

    ``open_one`` calls ``starter.start_agent``.
    """
    waiting: SimpleQueue[Host] = SimpleQueue()
    for host in hosts:
        waiting.put(host)
    if isinstance(starter, StartsTogether):
        starter.expect(hosts)

    def open_some() -> None:
        while True:
            try:
                host = waiting.get_nowait()
            except Empty:
                return
            open_one(host)

    for number in range(min(FAN_OUT, len(hosts))):
        name = f"open {number}"
        threading.Thread(target=open_some, name=name, daemon=True).start()
