"""What moves bytes between ranks: the seam for transports. No sockets, no TensorFlow.

Every rank makes the same calls in the same order; that they do is for the caller to
ensure (``group``). A transport is used by one thread at a time, but for
``waiting_for``, ``waited_s`` and ``interrupt``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class ReduceOp(Enum):
    """How the ranks' values become one."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    ADASUM = "adasum"


UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}
"""The operations that transports know; averages are made of sums."""


class Transport(Protocol):
    """Collective operations on raw data.

    All raise PeerLostError where a rank is gone and CollectiveTimeoutError where one is
    late; nothing can be called after that but ``close``.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for others since the start."""
        ...

    @property
    def waiting_for(self) -> tuple[int, ...]:
        """The ranks that are being waited for at this moment."""
        ...

    def allreduce(
        self,
        buffer: Array,
        op: ReduceOp,
        source: Array | None = None,
        scale: float = 1.0,
    ) -> None:
        """Combine contiguous vectors of equal length; the result is in ``buffer``.

        This rank's values are ``scale`` times ``source``, which is another vector, or
        else what the buffer has. Bit by bit the same on every rank.
        """
        ...

    def allgather(self, data: bytes) -> list[bytes]:
        """Every rank's data, of any lengths, in rank order."""
        ...

    def alltoall(self, parts: Sequence[bytes]) -> list[bytes]:
        """``parts[r]`` goes to rank r; what every rank has sent here, in rank order."""
        ...

    def broadcast(self, data: bytes, root: int) -> bytes:
        """The data of rank ``root``; the others' is ignored."""
        ...

    def barrier(self) -> None:
        """Return when all ranks have called."""
        ...

    def interrupt(self) -> None:
        """What waits for others fails soon, and what they wait for of this rank.

        Called from another thread, and again for as long as there is a wait: the first
        time may have been too early. Called before ``close`` where this rank fails.
        """
        ...

    def close(self) -> None: ...


def fill(buffer: Array, source: Array | None, scale: float) -> None:
    """What ``Transport.allreduce`` combines, in the buffer itself."""
    if source is not None:
        np.multiply(source, buffer.dtype.type(scale), out=buffer)


def flat_bytes(arrays: Sequence[Array]) -> bytes:
    """The arrays' bytes one after the other."""
    return b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
