"""The built-in tf.data service: data:0 is the dispatcher, all data tasks are workers.

Clients reach the dispatcher at TFCLUSTER_DATA_SERVICE; it sends them the list of
workers.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tfcluster.protocol.task_events import ServerMessage
from tfcluster.runtime.context import Context
from tfcluster.runtime.errors import ContextError
from tfcluster.runtime.telemetry.agent_channel import reporter

_CONNECT_TIMEOUT_S = 60.0

_HEARTBEAT_MS = 500
_WORKER_TIMEOUT_MS = 5000
"""A data task is considered dead this long after its last heartbeat."""


def start(context: Context) -> list[object]:
    """Start the servers of ``context``'s task; they stop when garbage-collected.

    Raises ContextError if the dispatcher's address is not known, or if the journal's
    folder belongs to another user.
    """
    protocol, _, address = (context.data_service or "").partition("://")
    host, _, port = address.rpartition(":")
    if not protocol or not host or not port.isdecimal():
        raise ContextError(
            f"TFCLUSTER_DATA_SERVICE={context.data_service!r} is not grpc://HOST:PORT"
        )
    from tensorflow.data.experimental import service

    servers: list[object] = []
    if context.task_index == 0:
        # From the journal, a restarted dispatcher knows what it has already given out.
        journal = _private(journal_of(context))
        config = service.DispatcherConfig(
            port=int(port),
            protocol=protocol,
            work_dir=str(journal),
            fault_tolerant_mode=True,
            worker_timeout_ms=_WORKER_TIMEOUT_MS,
        )
        servers.append(service.DispatchServer(config))
        reporter().send(ServerMessage(int(port)))
    else:
        host = _own_address(host, int(port))
    with _held_port() as own:
        config = service.WorkerConfig(
            dispatcher_address=address,
            worker_address=f"{host}:{own}",
            port=own,
            protocol=protocol,
            heartbeat_interval_ms=_HEARTBEAT_MS,
        )
        servers.append(service.WorkerServer(config))
    reporter().send(ServerMessage(own))
    return servers


@contextmanager
def _held_port() -> Iterator[int]:
    """A free port, which only servers of the same user can open meanwhile.

    If TensorFlow chooses a port, it does not report it, but the agent has to know it.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("", 0))
        yield int(held.getsockname()[1])


def clear(context: Context) -> None:
    """Remove the journal: the service has stopped for good, or starts from scratch."""
    if context.task_index == 0:
        shutil.rmtree(journal_of(context), ignore_errors=True)


def journal_of(context: Context) -> Path:
    """The folder of the dispatcher's journal, on its own host."""
    name = f"tfcluster-{os.geteuid()}-{context.run or os.getpid()}-data"
    return Path(tempfile.gettempdir()) / name


def _private(folder: Path) -> Path:
    """Create ``folder`` with access for this user only, if it does not exist.

    Raises ContextError if another user owns it or has access to it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    mine = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700
    if not mine or not stat.S_ISDIR(status.st_mode):
        raise ContextError(f"{folder} must be accessible to you only: remove it")
    return folder


def _own_address(host: str, port: int) -> str:
    """The address of this host as the dispatcher sees it."""
    with socket.create_connection((host.strip("[]"), port), _CONNECT_TIMEOUT_S) as link:
        own = str(link.getsockname()[0])
    return f"[{own}]" if ":" in own else own
