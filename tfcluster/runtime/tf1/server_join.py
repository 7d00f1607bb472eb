"""Waits for the end of another task: until its port no longer accepts connections."""

from __future__ import annotations

import socket
from contextlib import suppress

from tfcluster.runtime.tf1.ps_reachability import Answer, probe
from tfcluster.runtime.tf1.wait_policy import wait_policy

_RECONNECT_S = 5.0
"""A silent connection is reopened after this time."""


def wait_until_closed(address: str) -> None:
    """Return once the server at ``host:port`` has been reachable and then closed.

    Raises CollectiveTimeoutError if the server is never reachable.
    """
    waiting = wait_policy(f"waiting for the chief ({address}) to listen")
    while probe(address) is Answer.CLOSED:
        waiting.wait()
    while _wait_for_close(address):
        pass


def _wait_for_close(address: str) -> bool:
    """Return when the server closes the connection, or has been silent for a while.

    Returns whether the server was reachable.
    """
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection(
            (host.strip("[]"), int(port)), _RECONNECT_S
        )
    except OSError:
        return False
    with connection, suppress(OSError):
        while connection.recv(4096):
            pass
    return True
