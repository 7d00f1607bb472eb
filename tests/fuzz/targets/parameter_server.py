"""Messages between training tasks and ps: lengths, header, arrays, and the service."""

from __future__ import annotations

import json
import math
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.fuzz.target import Target
from tfcluster.runtime.net import buffer_pool
from tfcluster.runtime.parameter_server import messages
from tfcluster.runtime.parameter_server.messages import MessageError, PsMessage
from tfcluster.runtime.parameter_server.server_socket import ServerSocket
from tfcluster.runtime.parameter_server.service import Service

_PREFIX = struct.Struct(">IQ")
_WAIT_S = 5.0
_SHARED = {0: np.zeros(4096, np.uint8), 1: np.zeros(64, np.uint8)}


def _receive(data: bytes) -> None:
    """Any bytes; the message that they are is equal after it was sent again."""
    pool = buffer_pool.Pool()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        _fill(theirs, data)
        message = messages.receive(ours, pool, _SHARED)
    if message.shared_buffer is None:
        _check_same(message, _sent(message))


def _headers(data: bytes) -> None:
    """A header (the first line), and arrays of just the length that it declares."""
    text, _, rest = data.partition(b"\n")
    rest += bytes(-len(rest) % buffer_pool.ALIGNMENT)
    _receive(_PREFIX.pack(len(text), len(rest)) + text + rest)


def _sent(message: PsMessage) -> PsMessage:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        theirs.settimeout(_WAIT_S)
        messages.send(theirs, message)
        return messages.receive(ours, buffer_pool.Pool(), {})


def _check_same(one: PsMessage, other: PsMessage) -> None:
    # NaN is not equal to itself, but its text is.
    assert json.dumps(one.header) == json.dumps(other.header)
    assert len(one.arrays) == len(other.arrays)
    for array, again in zip(one.arrays, other.arrays, strict=True):
        assert (array.dtype, array.shape) == (again.dtype, again.shape)
        assert array.tobytes() == again.tobytes()


def _fill(connection: socket.socket, data: bytes) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    connection.setblocking(False)
    try:
        while data:
            data = data[connection.send(data) :]
    except BlockingIOError:
        pass
    connection.shutdown(socket.SHUT_WR)


def _serve(data: bytes) -> None:
    """Requests to a ps: each is answered, be it with an error, until one is broken."""
    # A server that does not listen: only the connection of one client matters.
    server = ServerSocket.__new__(ServerSocket)
    server._service = Service(1, _no_engine)
    server._pool = buffer_pool.Pool()
    server._lock = threading.Lock()
    server._connections = set()
    ours, theirs = _tcp_pair()
    with ours:
        _fill(theirs, _requests_of(data))
        # It ends by the end of file, or by what it handles itself.
        server._serve_client(0, ours)
    theirs.close()


def _requests_of(data: bytes) -> bytes:
    """Headers, one for each line, as requests; ``arrays`` get zeros as their data."""
    parts = []
    for line in data.split(b"\n")[:20]:
        length = _declared(line)
        parts.append(_PREFIX.pack(len(line), length) + line + bytes(length))
    return b"".join(parts)


def _declared(line: bytes) -> int:
    """The length of the arrays that a header declares; 0 if it is unusable."""
    try:
        arrays = json.loads(line).get("arrays", ())
        sizes = [
            int(math.prod(shape)) * np.dtype(name).itemsize for name, shape in arrays
        ]
        length = sum(map(messages.padded, sizes))
    except (ArithmeticError, AttributeError, RecursionError, TypeError, ValueError):
        return 0
    return length if 0 <= length < 1 << 16 else 0


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    return ours, theirs


def _no_engine(values: Sequence[object]) -> Any:
    raise ValueError("no TensorFlow here")


_REQUESTS: tuple[Mapping[str, Any], ...] = (
    {"op": "put", "key": "a", "text": "b"},
    {"op": "get", "key": "a"},
    {"op": "pull", "model": "m"},
    {"op": "push", "model": "m", "kinds": "ds-", "version": 1}
    | {"arrays": [["float32", [2]], ["float32", [1, 2]], ["int64", [1]]]},
    {"op": "slots", "model": "m"},
    {"op": "has_update", "model": "m", "kinds": "d"},
    {"op": "define", "model": "m", "facts": {"rows_only": [False]}, "pieces": []}
    | {"arrays": [["uint8", [0]]]},
    {"op": "assign", "model": "m", "target": 0, "arrays": [["float32", []]]},
    {"op": "share", "pid": 1, "descriptor": 3, "nonce": "00", "sizes": [4096, 4096]},
)


def _seeds() -> list[bytes]:
    return [
        _packed({"op": "pull"}, []),
        _packed({"op": "push", "version": 1}, [np.arange(6.0).reshape(2, 3)]),
        _packed({}, [np.ones(3, np.int32), np.zeros((2, 0), np.float16)]),
        _PREFIX.pack(27, 0) + b'{"buffer":0,"arrays":[]}   ',
    ]


def _packed(header: Mapping[str, Any], arrays: Sequence[Any]) -> bytes:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        messages.send(theirs, PsMessage(header, arrays))
        return ours.recv(1 << 16)


def _header_seeds() -> list[bytes]:
    texts = [
        {"op": "push", "arrays": [["float32", [2, 3]], ["int64", [4]]]},
        {"op": "push", "arrays": [["bool", [64]]]},
        {"op": "push", "arrays": [], "version": 0.5},
        {"buffer": 0, "arrays": [["float64", [8]]]},
    ]
    lengths = [128, 64, 0, 0]
    return [
        json.dumps(text).encode() + b"\n" + bytes(length)
        for text, length in zip(texts, lengths, strict=True)
    ]


_ERRORS = (MessageError, EOFError, OSError)
_WORDS = (b'"arrays":[[', b'"float32"', b'"O"', b'"V0"', b'"S0"', b'"f4,f4"', b"[2,-3]")

TARGETS = (
    Target("ps-bytes", _receive, _seeds, _ERRORS, _WORDS),
    Target("ps-headers", _headers, _header_seeds, _ERRORS, _WORDS),
    Target(
        "ps-service",
        _serve,
        lambda: [
            b"\n".join(json.dumps(request).encode() for request in _REQUESTS),
            *(json.dumps(request).encode() for request in _REQUESTS),
        ],
        (),
        (*_WORDS, b'{"op":"', b'"model":"m"'),
    ),
)
