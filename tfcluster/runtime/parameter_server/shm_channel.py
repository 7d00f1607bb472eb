"""The two ends of a connection with shared memory: which buffer is used when."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from tfcluster.runtime.parameter_server.messages import Message
from tfcluster.runtime.parameter_server.shm_buffers import (
    BufferTable,
    ShmBuffers,
    attach,
    create,
    offer,
)

Array = NDArray[Any]

_ANSWERS = 3
"""Answer buffers for each model: arrays of an answer may still be in use when the next
answer comes, and may stay in use for long."""
_MIN_BYTES = 1 << 15
"""Messages smaller than this are as fast through the socket."""


class ClientChannel:
    """The training task's end for one ps; it has a few buffers for each model."""

    def __init__(self) -> None:
        self.rooms = BufferTable()
        self._first: dict[str, int] = {}
        self._next: ShmBuffers | None = None

    def offer(self, size: int) -> tuple[Message, int] | None:
        """A message that offers buffers of ``size`` bytes to the ps, and a descriptor.

        ``agreed`` closes the descriptor. None if buffers are impossible or no use.
        """
        if size < _MIN_BYTES:
            return None
        sizes = [size] * (1 + _ANSWERS)
        try:
            descriptor, rooms = create(sizes)
        except OSError:
            return None
        self._next = rooms
        told = {"op": "share", **offer(descriptor, rooms, sizes)}
        return Message(told), descriptor

    def agreed(self, model: str, answer: Message, descriptor: int) -> None:
        """Take the answer of the ps to the last offer."""
        os.close(descriptor)
        rooms, self._next = self._next, None
        if rooms is not None and answer.header.get("shared"):
            self._first[model] = len(self.rooms)
            self.rooms.add(rooms, 1 + _ANSWERS)

    def placed(self, model: str, message: Message) -> Message:
        """A push whose arrays are in our buffer, and which names one for its answer."""
        first = self._first.get(model)
        if first is None:
            return message
        answers = range(first + 1, first + 1 + _ANSWERS)
        free = [number for number in answers if self.rooms.is_free(number)]
        if free:
            header = {**message.header, "answer_room": free[0]}
            message = Message(header, message.arrays)
        return _moved(message, first, self.rooms[first])


class ServerChannel:
    """The end of the ps for one training task."""

    def __init__(self) -> None:
        self.rooms = BufferTable()

    def attach(self, request: Message) -> Message:
        """Answer an offer of shared memory: open it if possible."""
        sizes = request.header["sizes"]
        try:
            rooms = attach(request.header)
        except OSError:
            # The client is on another host or in another container: use the socket.
            return Message({"shared": False})
        self.rooms.add(rooms, len(sizes))
        return Message({"shared": True})

    def answer(self, header: Mapping[str, Any], answer: Message) -> Message:
        """The answer, with its arrays in the buffer that the request names."""
        number = header.get("answer_room")
        if not isinstance(number, int) or number not in self.rooms:
            return answer
        return _moved(answer, number, self.rooms[number])


def _moved(message: Message, number: int, room: Array) -> Message:
    """The message with its arrays in the buffer, if they fit and it is worthwhile."""
    if _MIN_BYTES <= message.size <= len(room):
        return message.moved(room, number)
    return message
