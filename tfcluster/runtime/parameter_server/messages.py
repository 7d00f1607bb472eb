"""Messages between training tasks and ps: a small JSON header, then raw arrays.

    4 bytes   length of the header
    8 bytes   length of what follows it
    header    JSON; "arrays" has a dtype and a shape for each array
    arrays    one after the other, each starting at a multiple of 64 bytes

If the header has a "buffer", the arrays are in that buffer of shared memory instead.
Nothing is copied: arrays are sent from where they are, and received with the alignment
that TensorFlow needs to use them as tensors. Sockets may be blocking or non-blocking.

Shared memory is a file that the training task creates and a ps on its host opens: see
``net.memfd``. It is divided into buffers. Client and ps take turns, so that neither
reads a buffer while the other writes to it; the two ends of a connection decide which
buffer is used when. If it is not available, everything goes through the socket.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tfcluster.protocol.wire import loads
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.net import memfd
from tfcluster.runtime.net.buffer_pool import ALIGNMENT, Pool

Bytes: TypeAlias = NDArray[np.uint8]
Header: TypeAlias = Mapping[str, Any]
"""The JSON object of a message; docs/protocols.md lists its keys."""

_PREFIX = struct.Struct(">IQ")
_MAX_HEADER = 1 << 26
_MAX_VIEWS = 512
"""Buffers per sendmsg call; Linux accepts at most 1024 (IOV_MAX)."""
_MAX_PORTION = 1 << 22
_MAX_DIMENSIONS = 32
_MAX_ITEMS = 1 << 48
_ZEROS = bytes(ALIGNMENT)


class MessageError(Exception):
    """The peer violates the protocol."""


@dataclass(frozen=True, slots=True)
class PsMessage:
    """A header and arrays of any dtype and shape."""

    header: Header
    arrays: Sequence[Array] = field(default_factory=tuple)
    shared_buffer: int | None = None
    """The number of the shared buffer that already has the arrays; None if they are
    sent over the socket."""

    @property
    def size(self) -> int:
        """The bytes that the arrays take in a message, including padding."""
        return sum(padded(array.nbytes) for array in self.arrays)

    def moved_to(self, buffer: Bytes, number: int) -> PsMessage:
        """A message with its arrays copied to shared buffer ``number``.

        ``buffer`` has shape (capacity,) with capacity at least ``size``.
        """
        offset = 0
        arrays = []
        for array in self.arrays:
            part = buffer[offset : offset + array.nbytes]
            part[:] = flat(array)
            arrays.append(part.view(array.dtype).reshape(array.shape))
            offset += padded(array.nbytes)
        return PsMessage(self.header, arrays, number)


def flat(array: Array) -> Bytes:
    """All of an array's bytes in C order, shape (nbytes,); a view if possible."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def padded(size: int) -> int:
    """``size`` bytes rounded up to a multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Outgoing:
    """A message that is being sent to a socket."""

    def __init__(self, message: PsMessage) -> None:
        arrays = [flat(array) for array in message.arrays]
        header = dict(message.header)
        if message.arrays:
            header["arrays"] = [[a.dtype.name, a.shape] for a in message.arrays]
        if message.shared_buffer is not None:
            header["buffer"] = message.shared_buffer
            arrays = []
        text = json.dumps(header, separators=(",", ":")).encode()
        length = sum(padded(len(array)) for array in arrays)
        self._views = [memoryview(_PREFIX.pack(len(text), length) + text)]
        for array in arrays:
            if len(array):
                self._views.append(array.data)
            if rest := -len(array) % ALIGNMENT:
                self._views.append(memoryview(_ZEROS)[:rest])
        self._next = 0

    @property
    def done(self) -> bool:
        """Whether everything has been sent."""
        return self._next == len(self._views)

    def send(self, connection: socket.socket) -> int:
        """Send a part of the message; return the number of bytes.

        Raises OSError; BlockingIOError if a non-blocking socket is not ready.
        """
        views = self._views[self._next : self._next + _MAX_VIEWS]
        sent = left = connection.sendmsg(views)
        for view in views:
            if left < len(view):
                self._views[self._next] = view[left:]
                break
            left -= len(view)
            self._next += 1
        return sent


class Incoming:
    """A message that is being received from a socket."""

    def __init__(
        self, pool: Pool, shared_buffers: Mapping[int, Bytes] | None = None
    ) -> None:
        """``shared_buffers`` has the buffers with the peer's arrays, by number."""
        self._pool = pool
        self._shared_buffers = shared_buffers or {}
        self._buffer = np.empty(_PREFIX.size, np.uint8)
        self._view = self._buffer.data
        self._position = 0
        self._stage = 0
        self._header: dict[str, Any] = {}
        self._length = 0

    @property
    def begun(self) -> bool:
        """Whether anything has been received."""
        return self._stage > 0 or self._position > 0

    @property
    def done(self) -> bool:
        """Whether the whole message has been received."""
        return self._stage == 3

    def receive(self, connection: socket.socket) -> None:
        """Receive a part of the message.

        Raises EOFError if the peer has disconnected, MessageError if it violates the
        protocol, and OSError; BlockingIOError if a non-blocking socket is not ready.
        """
        end = self._position + _MAX_PORTION
        count = connection.recv_into(self._view[self._position : end])
        if count == 0:
            raise EOFError
        self._position += count
        while not self.done and self._position == len(self._view):
            self._advance()

    def message(self) -> PsMessage:
        """The received message, once ``done``. Its arrays are views of the buffer."""
        arrays = []
        offset = 0
        number = self._header.pop("buffer", None)
        buffer = self._buffer if number is None else self._shared_buffers[number]
        for name, shape in self._header.pop("arrays", ()):
            dtype = np.dtype(name)
            size = math.prod(shape) * dtype.itemsize
            part = buffer[offset : offset + size]
            arrays.append(part.view(dtype).reshape(shape))
            offset += padded(size)
        return PsMessage(self._header, arrays, number)

    def _advance(self) -> None:
        self._stage += 1
        if self._stage == 1:
            header, self._length = _PREFIX.unpack(self._buffer.tobytes())
            if header > _MAX_HEADER:
                raise MessageError("an oversized header")
            self._receive_into(np.empty(header, np.uint8))
        elif self._stage == 2:
            text = self._buffer.tobytes()
            self._header = _parsed(text, self._length, self._shared_buffers)
            try:
                self._receive_into(self._pool.empty(self._length, np.uint8))
            except (MemoryError, ValueError) as error:
                raise MessageError(
                    f"arrays of {self._length} bytes, for which memory is lacking"
                ) from error

    def _receive_into(self, buffer: Bytes) -> None:
        self._buffer, self._view, self._position = buffer, buffer.data, 0


def _parsed(
    text: bytes, length: int, shared_buffers: Mapping[int, Bytes]
) -> dict[str, Any]:
    try:
        header = loads(text)
        sizes = [_size(name, shape) for name, shape in header.get("arrays", ())]
        number = header.get("buffer")
        capacity = None if number is None else len(shared_buffers[number])
    except (
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        SyntaxError,
    ) as error:
        raise MessageError(f"a header that cannot be read: {error}") from error
    needed = sum(map(padded, sizes))
    fits = needed == length if capacity is None else needed <= capacity and length == 0
    if not fits:
        raise MessageError("a header that does not match its data")
    return dict(header)


def _size(name: object, shape: object) -> int:
    """The bytes of such an array. Raises TypeError or ValueError if it cannot exist."""
    dtype = np.dtype(name) if isinstance(name, str) else None
    if dtype is None or dtype.name != name or dtype.hasobject or not dtype.itemsize:
        raise ValueError(f"{name!r} is not a dtype of arrays")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{shape!r} is not a shape")
    if len(shape) > _MAX_DIMENSIONS or math.prod(n or 1 for n in shape) > _MAX_ITEMS:
        raise ValueError(f"{shape!r} is too large")
    return math.prod(shape) * dtype.itemsize


def send(connection: socket.socket, message: PsMessage) -> None:
    """Send a message over a blocking socket. Raises OSError."""
    outgoing = Outgoing(message)
    while not outgoing.done:
        outgoing.send(connection)


def receive(
    connection: socket.socket, pool: Pool, shared_buffers: Mapping[int, Bytes]
) -> PsMessage:
    """Receive a message from a blocking socket.

    Raises what ``Incoming.receive`` raises.
    """
    incoming = Incoming(pool, shared_buffers)
    while not incoming.done:
        incoming.receive(connection)
    return incoming.message()


# --- shared memory --------------------------------------------------------------------


class ShmBuffers:
    """The buffers of one file: arrays with dtype uint8 and shape (size,).

    Each size is rounded up to whole pages. The first page of the file holds a nonce.
    """

    def __init__(self, descriptor: int, sizes: Sequence[int]) -> None:
        self._buffers: list[Bytes] = []
        self.nonce = os.pread(descriptor, memfd.NONCE_BYTES, 0)
        offset = mmap.PAGESIZE
        for size in map(_pages, sizes):
            memory = mmap.mmap(descriptor, size, offset=offset)
            self._buffers.append(np.frombuffer(memory, np.uint8))
            offset += size
        self._unused = [self._references(index) for index in range(len(sizes))]

    def __getitem__(self, index: int) -> Bytes:
        return self._buffers[index]

    def is_free(self, index: int) -> bool:
        """Whether no array in this process refers to that buffer."""
        return self._references(index) <= self._unused[index]

    def _references(self, index: int) -> int:
        return sys.getrefcount(self._buffers[index])


class BufferTable(Mapping[int, Bytes]):
    """All buffers of a connection, by number; keeps no references to their arrays."""

    def __init__(self) -> None:
        self._entries: list[tuple[ShmBuffers, int]] = []

    def add(self, buffers: ShmBuffers, count: int) -> None:
        """Add the buffers of a file; they get the next numbers."""
        self._entries += [(buffers, index) for index in range(count)]

    def __getitem__(self, number: int) -> Bytes:
        if not 0 <= number < len(self._entries):
            raise KeyError(number)
        buffers, index = self._entries[number]
        return buffers[index]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._entries)))

    def __len__(self) -> int:
        return len(self._entries)

    def is_free(self, number: int) -> bool:
        """Whether no array in this process refers to buffer ``number``."""
        buffers, index = self._entries[number]
        return buffers.is_free(index)


def create(sizes: Sequence[int]) -> tuple[int, ShmBuffers]:
    """Create buffers of these sizes in bytes; return their descriptor, too.

    Raises OSError if there is not enough memory.
    """
    with memfd.created("tfcluster-parameters", _bytes(sizes)) as descriptor:
        return descriptor, ShmBuffers(descriptor, sizes)


def offer(
    descriptor: int, buffers: ShmBuffers, sizes: Sequence[int]
) -> dict[str, object]:
    """The JSON fields that the other process needs for ``attach``."""
    return {
        "pid": os.getpid(),
        "descriptor": descriptor,
        "nonce": buffers.nonce.hex(),
        "sizes": list(sizes),
    }


def attach(offered: Mapping[str, Any]) -> ShmBuffers:
    """Open the buffers that another process on this host has offered.

    Raises OSError if they cannot be opened, or are not the offered buffers.
    """
    sizes = [int(size) for size in offered["sizes"]]
    pid, descriptor = int(offered["pid"]), int(offered["descriptor"])
    nonce = bytes.fromhex(offered["nonce"])
    with memfd.opened(pid, descriptor, _bytes(sizes), nonce) as memory:
        return ShmBuffers(memory, sizes)


def _bytes(sizes: Sequence[int]) -> int:
    return mmap.PAGESIZE + sum(map(_pages, sizes))


def _pages(size: int) -> int:
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE


_ANSWERS = 3
"""Answer buffers for each model: arrays of an answer may still be in use when the next
answer arrives, and may stay in use for a long time."""
_MIN_BYTES = 1 << 15
"""Messages smaller than this are as fast through the socket."""


class ClientChannel:
    """The training task's end for one ps; it has a few buffers for each model."""

    def __init__(self) -> None:
        self.buffers = BufferTable()
        self._first_buffer: dict[str, int] = {}
        self._offered: ShmBuffers | None = None

    def offer(self, size: int) -> tuple[PsMessage, int] | None:
        """A message that offers buffers of ``size`` bytes to the ps, and a descriptor.

        ``accept_answer`` closes the descriptor. Returns None if buffers are impossible
        or would not help.
        """
        if size < _MIN_BYTES:
            return None
        sizes = [size] * (1 + _ANSWERS)
        try:
            descriptor, buffers = create(sizes)
        except OSError:
            return None
        self._offered = buffers
        header = {"op": "share", **offer(descriptor, buffers, sizes)}
        return PsMessage(header), descriptor

    def accept_answer(self, model: str, answer: PsMessage, descriptor: int) -> None:
        """Process the ps's answer to the last offer."""
        os.close(descriptor)
        buffers, self._offered = self._offered, None
        if buffers is not None and answer.header.get("shared"):
            self._first_buffer[model] = len(self.buffers)
            self.buffers.add(buffers, 1 + _ANSWERS)

    def with_shared_buffers(self, model: str, message: PsMessage) -> PsMessage:
        """A push whose arrays are in our buffer, and which names an answer buffer."""
        first = self._first_buffer.get(model)
        if first is None:
            return message
        answers = range(first + 1, first + 1 + _ANSWERS)
        free = [number for number in answers if self.buffers.is_free(number)]
        if free:
            header = {**message.header, "answer_buffer": free[0]}
            message = PsMessage(header, message.arrays)
        return _in_buffer(message, first, self.buffers[first])


class ServerChannel:
    """The ps's end for one training task."""

    def __init__(self) -> None:
        self.buffers = BufferTable()

    def attach(self, request: PsMessage) -> PsMessage:
        """Answer an offer of shared memory: open it if possible."""
        sizes = request.header["sizes"]
        try:
            buffers = attach(request.header)
        except OSError:
            # The client is on another host or in another container: use the socket.
            return PsMessage({"shared": False})
        self.buffers.add(buffers, len(sizes))
        return PsMessage({"shared": True})

    def answer(self, header: Header, answer: PsMessage) -> PsMessage:
        """The answer, with its arrays in the buffer that the request names."""
        number = header.get("answer_buffer")
        if not isinstance(number, int) or number not in self.buffers:
            return answer
        return _in_buffer(answer, number, self.buffers[number])


def _in_buffer(message: PsMessage, number: int, buffer: Bytes) -> PsMessage:
    """The message, with its arrays in the buffer if they fit and this is worthwhile."""
    if _MIN_BYTES <= message.size <= len(buffer):
        return message.moved_to(buffer, number)
    return message
