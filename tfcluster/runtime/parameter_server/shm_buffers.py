"""Shared memory between a training task and a ps on its host, for arrays of messages.

It is a file that the training task creates and the ps opens: see ``net.memfd``. It is
divided into buffers. Client and ps take turns, so that neither reads a buffer while the
other writes to it; the two ends of a connection decide which buffer is used when. If
shared memory is not available, everything goes through the
socket.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfcluster.runtime.net import memfd
from tfcluster.runtime.parameter_server.messages import Bytes, Header, Message


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
    with memfd.opened(pid, descriptor, _bytes(sizes), nonce) as found:
        return ShmBuffers(found, sizes)


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

    def offer(self, size: int) -> tuple[Message, int] | None:
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
        return Message(header), descriptor

    def accept_answer(self, model: str, answer: Message, descriptor: int) -> None:
        """Process the ps's answer to the last offer."""
        os.close(descriptor)
        buffers, self._offered = self._offered, None
        if buffers is not None and answer.header.get("shared"):
            self._first_buffer[model] = len(self.buffers)
            self.buffers.add(buffers, 1 + _ANSWERS)

    def with_shared_buffers(self, model: str, message: Message) -> Message:
        """A push whose arrays are in our buffer, and which names an answer buffer."""
        first = self._first_buffer.get(model)
        if first is None:
            return message
        answers = range(first + 1, first + 1 + _ANSWERS)
        free = [number for number in answers if self.buffers.is_free(number)]
        if free:
            header = {**message.header, "answer_buffer": free[0]}
            message = Message(header, message.arrays)
        return _in_buffer(message, first, self.buffers[first])


class ServerChannel:
    """The ps's end for one training task."""

    def __init__(self) -> None:
        self.buffers = BufferTable()

    def attach(self, request: Message) -> Message:
        """Answer an offer of shared memory: open it if possible."""
        sizes = request.header["sizes"]
        try:
            buffers = attach(request.header)
        except OSError:
            # The client is on another host or in another container: use the socket.
            return Message({"shared": False})
        self.buffers.add(buffers, len(sizes))
        return Message({"shared": True})

    def answer(self, header: Header, answer: Message) -> Message:
        """The answer, with its arrays in the buffer that the request names."""
        number = header.get("answer_buffer")
        if not isinstance(number, int) or number not in self.buffers:
            return answer
        return _in_buffer(answer, number, self.buffers[number])


def _in_buffer(message: Message, number: int, buffer: Bytes) -> Message:
    """The message, with its arrays in the buffer if they fit and this is worthwhile."""
    if _MIN_BYTES <= message.size <= len(buffer):
        return message.moved_to(buffer, number)
    return message
