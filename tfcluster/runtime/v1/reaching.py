"""Parameter servers are there before a session is made on them, or are gone.

TensorFlow waits for a server without end, whether it is late or dead.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from tfcluster.runtime.collective.errors import PeerLostError
from tfcluster.runtime.v1.deadlines import patience

_ANSWER_S = 5.0


class Reach:
    """What is known of the parameter servers of ``cluster``."""

    def __init__(self, cluster: Mapping[str, Sequence[str]]) -> None:
        self._addresses = {
            f"ps:{index}": address
            for index, address in enumerate(cluster.get("ps", ()))
        }
        self._met: set[str] = set()

    def require(self) -> None:
        """Return when all of them listen.

        Raises PeerLostError for one that was there before, CollectiveTimeoutError for
        one that never came.
        """
        for task, address in self._addresses.items():
            waiting = patience(f"waiting for {task} ({address}) to listen")
            while not listens(address):
                if task in self._met:
                    raise PeerLostError(
                        f"{task} ({address}) is gone, and the variables that it held "
                        "with it: start the job again from its last checkpoint "
                        "(restart: {max: 1, scope: job} does it by itself)"
                    )
                waiting.wait()
            self._met.add(task)


def listens(address: str) -> bool:
    """Whether somebody takes connections at ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except OSError:
        return False
    return True
