"""Wait for the end of another task: when its port no longer accepts connections."""

from __future__ import annotations

import socket
from contextlib import suppress

from tfcluster.runtime.tf1.ps_reachability import Answer, ask
from tfcluster.runtime.tf1.wait_policy import patience

_LOOK_S = 5.0
"""A connection that stays silent is reopened after this time."""


def until_gone(address: str) -> None:
    """Return when the server at ``host:port`` has come and gone.

    Raises CollectiveTimeoutError if it never comes.
    """
    waiting = patience(f"waiting for the chief ({address}) to listen")
    while ask(address) is Answer.GONE:
        waiting.wait()
    while _stays(address):
        pass


def _stays(address: str) -> bool:
    """Whether it was reachable. Returns after silence, or as soon as it hangs up."""
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), _LOOK_S)
    except OSError:
        return False
    with connection, suppress(OSError):
        while connection.recv(4096):
            pass
    return True
