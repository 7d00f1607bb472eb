"""The wait for the TensorFlow servers of other tasks. Does not need TensorFlow.

TensorFlow itself waits forever for a late or dead server. A ps starts TensorFlow's
server only on request. A wait warns after a while, and gives up in the end.
"""

from __future__ import annotations

import enum
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tfcluster.protocol.task_events import Waiting
from tfcluster.runtime import process_group
from tfcluster.runtime.errors import CollectiveTimeoutError, PeerLostError
from tfcluster.runtime.telemetry.agent_channel import reporter

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5


@dataclass
class WaitPolicy:
    """Defines how long to wait for ``what``, and when to warn."""

    what: str
    warning_s: float | None
    timeout_s: float | None
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep
    _began_s: float = field(init=False)
    _pause_s: float = field(init=False, default=_FIRST_PAUSE_S)
    _warn_s: float | None = field(init=False)

    def __post_init__(self) -> None:
        self._began_s = self.clock()
        self._warn_s = self.warning_s

    @property
    def left_s(self) -> float | None:
        """Seconds left; None if there is no timeout."""
        if self.timeout_s is None:
            return None
        return max(0.0, self.timeout_s - (self.clock() - self._began_s))

    def wait(self) -> None:
        """Pause before a new attempt. Raises CollectiveTimeoutError when time is up."""
        waited_s = self.clock() - self._began_s
        if self.left_s == 0.0:
            raise CollectiveTimeoutError(
                f"{self.what}: given up after {waited_s:.0f} s"
            )
        if self._warn_s is not None and waited_s >= self._warn_s:
            self._warn_s *= 2
            reporter().send(Waiting(waited_s, self.what))
            sys.stderr.write(f"tfcluster: {self.what}, for {waited_s:.0f} s now\n")
        self.pause(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


def wait_policy(what: str) -> WaitPolicy:
    """The policy of ``runtime.stall_warning`` and ``runtime.stall_timeout``."""
    options = process_group.context().options
    return WaitPolicy(what, options.stall_warning_s, options.stall_timeout_s)


_PROBE_TIMEOUT_S = 5.0


class PsReachability:
    """Tracks which parameter servers of ``cluster`` have been reached so far.

    ``ask(index)`` asks that ps to start its server; see ``request_server``.
    """

    def __init__(
        self,
        cluster: Mapping[str, Sequence[str]],
        ask: Callable[[int], object] | None = None,
    ) -> None:
        self._addresses = {
            f"ps:{index}": address
            for index, address in enumerate(cluster.get("ps", ()))
        }
        self._ask = ask
        self._reached: set[str] = set()

    def require(self) -> None:
        """Return when all parameter servers listen.

        Raises PeerLostError if a ps was reached before and is gone,
        CollectiveTimeoutError if a ps does not listen in time, and CollectiveError if a
        ps cannot start TensorFlow's server.
        """
        for index, (task, address) in enumerate(self._addresses.items()):
            waiting = wait_policy(f"waiting for {task} ({address}) to listen")
            ask = self._ask
            while (answer := probe(address)) is not Reachability.READY:
                if task in self._reached and answer is Reachability.CLOSED:
                    raise PeerLostError(
                        f"{task} ({address}) is gone, with the variables that it held: "
                        "restart the job from its last checkpoint (restart: {max: 1, "
                        "scope: job} does so automatically)"
                    )
                if ask is not None and ask(index):
                    ask = None  # The ps has started the server, which answers soon.
                else:
                    waiting.wait()
            self._reached.add(task)

    def lost(self) -> bool:
        """Whether a ps that was reached before does not answer now."""
        return any(
            probe(self._addresses[task]) is not Reachability.READY
            for task in self._reached
        )


class Reachability(enum.Enum):
    """How a server responds to a connection."""

    READY = enum.auto()
    SILENT = enum.auto()
    """The connection stays open, but the server has sent nothing yet."""
    CLOSED = enum.auto()


def probe(address: str) -> Reachability:
    """Connect to the gRPC server at ``host:port`` and wait for its first bytes.

    A connection alone proves nothing: the kernel still accepts connections for a killed
    process while it closes the process's sockets. A gRPC server first sends its HTTP/2
    settings (RFC 9113, section 3.4).
    """
    host, _, port = address.rpartition(":")
    endpoint = (host.strip("[]"), int(port))
    try:
        with socket.create_connection(endpoint, _PROBE_TIMEOUT_S) as connection:
            return Reachability.READY if connection.recv(1) else Reachability.CLOSED
    except TimeoutError:
        return Reachability.SILENT
    except OSError:
        return Reachability.CLOSED


_RECONNECT_S = 5.0
"""A silent connection is reopened after this time."""


def wait_until_closed(address: str) -> None:
    """Return once the server at ``host:port`` has been reachable and then closed.

    Raises CollectiveTimeoutError if the server is never reachable.
    """
    waiting = wait_policy(f"waiting for the chief ({address}) to listen")
    while probe(address) is Reachability.CLOSED:
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
