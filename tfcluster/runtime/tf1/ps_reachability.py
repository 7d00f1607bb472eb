"""This task's TensorFlow server, and the wait for the servers of other tasks.

TensorFlow itself waits forever for a late or dead server. A ps starts TensorFlow's
server only on request. A wait warns after a while, and gives up in the end.

The port of this task's own server can be opened only once. Either the script creates
the server, or a session without another target does; later requests return the same
server.
"""

from __future__ import annotations

import enum
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

import tensorflow as tf

from tfcluster.runtime import process_group, tf_internals, tf_server
from tfcluster.runtime.context import Context
from tfcluster.runtime.contract import Place
from tfcluster.runtime.errors import CollectiveTimeoutError, PeerLostError
from tfcluster.runtime.telemetry.agent_channel import Waiting, reporter
from tfcluster.runtime.tf1 import patches
from tfcluster.runtime.tf1.cluster_formats import OLD_NAMES
from tfcluster.runtime.tf1.cluster_members import cluster_of
from tfcluster.runtime.tf1_types import ConfigProto

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
            reporter().waiting(Waiting(waited_s, self.what))
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
            while (answer := probe(address)) is not Answer.READY:
                if task in self._reached and answer is Answer.CLOSED:
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
            probe(self._addresses[task]) is not Answer.READY for task in self._reached
        )


class Answer(enum.Enum):
    """How a server responds to a connection."""

    READY = enum.auto()
    SILENT = enum.auto()
    """The connection stays open, but the server has sent nothing yet."""
    CLOSED = enum.auto()


def probe(address: str) -> Answer:
    """Connect to the gRPC server at ``host:port`` and wait for its first bytes.

    A connection alone proves nothing: the kernel still accepts connections for a killed
    process while it closes the process's sockets. A gRPC server first sends its HTTP/2
    settings (RFC 9113, section 3.4).
    """
    host, _, port = address.rpartition(":")
    endpoint = (host.strip("[]"), int(port))
    try:
        with socket.create_connection(endpoint, _PROBE_TIMEOUT_S) as connection:
            return Answer.READY if connection.recv(1) else Answer.CLOSED
    except TimeoutError:
        return Answer.SILENT
    except OSError:
        return Answer.CLOSED


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


# --- the server of this task ----------------------------------------------------------


tf1 = tf.compat.v1


ServerDefinition: TypeAlias = (
    "tf.train.ServerDef | tf.train.ClusterSpec | tf.train.ClusterDef | "
    "Mapping[str, Sequence[str]]"
)
"""The types that the constructor of ``tf.distribute.Server`` accepts."""


class SharedServer:
    """Replaces the constructor and ``join`` of ``tf.distribute.Server``."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._address = context.cluster[context.task_type][context.task_index]
        self._server: tf_internals.Server | None = None

    def start(self) -> tf_internals.Server:
        """The server, which the first call starts."""
        if self._server is None:
            tf_server.start(self._context)
        assert self._server is not None  # The patched constructor has set it.
        return self._server

    def is_target(self, target: str) -> bool:
        """Whether a session with this target runs on our server."""
        if target == f"grpc://{self._address}":
            self.start()
            return True
        return self._server is not None and target == self._server.target

    def install(self) -> None:
        """Install the patches of ``tf.distribute.Server`` in this process."""
        patches.TABLE.install(
            {patches.SERVER_INIT: self.create, patches.SERVER_JOIN: self.join},
            Place.LAST,
            always=True,
        )

    def create(
        self,
        original: Callable[..., None],
        server: tf_internals.Server,
        definition: ServerDefinition,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: ConfigProto | None = None,
        start: bool = True,  # TensorFlow's own signature
    ) -> None:
        """Replaces ``Server.__init__``: all objects for our address share a server."""
        if address_of(definition, job_name, task_index) != self._address:
            original(server, definition, job_name, task_index, protocol, config, start)
        elif self._server is None:
            options = self.config(config)
            original(server, definition, job_name, task_index, protocol, options)
            tf_server.report(self._address)
            self._server = server
        else:
            # Clients use only these two attributes.
            tf_internals.share_server(server, self._server)

    def join(self, original: Callable[..., None], server: tf_internals.Server) -> None:
        """Replaces ``Server.join``: except on the chief, waits until the chief ends."""
        ours = self._server is not None and tf_internals.is_same_server(
            server, self._server
        )
        if ours and not self._context.is_chief:
            # Serve as long as the chief needs the server: a TensorFlow server never
            # ends by itself.
            wait_until_closed(self._context.addresses[0])
        else:
            original(server)

    def config(self, config: ConfigProto | None) -> ConfigProto:
        """A copy of ``config`` with this task's device filters, unless it has some."""
        options: ConfigProto = tf1.ConfigProto()
        if config is not None:
            options.CopyFrom(config)
        if not options.device_filters:
            options.device_filters.extend(tf_server.filters_of(self._context))
        return options


def address_of(
    definition: ServerDefinition, job_name: str | None, task_index: int | None
) -> str | None:
    """The address that a server with this definition would use; None if it is unclear.

    ``definition`` is a ``ServerDef``, or a cluster in one of its forms.
    """
    if isinstance(definition, tf1.train.ServerDef):
        cluster = cluster_of(definition)
        job = job_name or definition.job_name
        index = definition.task_index if task_index is None else task_index
    else:
        cluster = cluster_of(definition)
        job = job_name or (next(iter(cluster)) if len(cluster) == 1 else "")
        index = task_index or 0
    addresses = cluster.get(OLD_NAMES.get(job, job), ())
    return addresses[index] if index < len(addresses) else None
