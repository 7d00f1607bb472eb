"""The built-in tf.data service: data:0 dispatches, and every data task produces.

Clients reach the dispatcher at TFCLUSTER_DATA_SERVICE, and learn the rest from it.
"""

from __future__ import annotations

import socket
from typing import Any

from tfcluster.runtime.context import Context
from tfcluster.runtime.errors import ContextError

_CONNECT_TIMEOUT_S = 60.0


def start(context: Context) -> list[Any]:
    """The running servers of ``context``'s task; they stop when they are collected.

    Raises ContextError where the address of the dispatcher is not known.
    """
    protocol, _, address = (context.data_service or "").partition("://")
    host, _, port = address.rpartition(":")
    if not protocol or not host or not port.isdecimal():
        raise ContextError(
            f"TFCLUSTER_DATA_SERVICE={context.data_service!r} is not grpc://HOST:PORT"
        )
    from tensorflow.data.experimental import service

    servers: list[Any] = []
    if context.task_index == 0:
        config = service.DispatcherConfig(port=int(port), protocol=protocol)
        servers.append(service.DispatchServer(config))
    else:
        host = _own_address(host, int(port))
    config = service.WorkerConfig(
        dispatcher_address=address, worker_address=f"{host}:%port%", protocol=protocol
    )
    servers.append(service.WorkerServer(config))
    return servers


def _own_address(host: str, port: int) -> str:
    """The address that the dispatcher's host sees us under."""
    with socket.create_connection((host.strip("[]"), port), _CONNECT_TIMEOUT_S) as link:
        own = str(link.getsockname()[0])
    return f"[{own}]" if ":" in own else own
