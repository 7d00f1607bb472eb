"""The two ends of a connection with shared memory: which buffer is used when."""

from __future__ import annotations

import os

from tfcluster.runtime.parameter_server.messages import Bytes, Header, Message
from tfcluster.runtime.parameter_server.shm_buffers import (
    BufferTable,
    ShmBuffers,
    attach,
    create,
    offer,
)

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
