"""The interface of transports, which move bytes between ranks. Knows no TensorFlow.

Every rank has to make the same calls in the same order, which ``group`` ensures. A
transport is used by one thread at a time, except for ``waiting_for``, ``waited_s``,
``exchanged_bytes`` and ``interrupt``, which any thread may use.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tfcluster.runtime.collective.rounding import Residual, Rounding

Array = NDArray[Any]


class ReduceOp(Enum):
    """How values of all ranks are reduced to one."""

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
"""The operations that transports know; averages are computed from sums."""


class Transport(Protocol):
    """Collective operations on raw data.

    All operations raise PeerLostError if a rank is gone, CollectiveTimeoutError if a
    rank is late, and CollectiveError if the ranks cannot be connected; after that only
    ``close`` may be called.
    """

    @property
    def rank(self) -> int:
        """This process's number among the ranks."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    @property
    def several_hosts(self) -> bool:
        """Whether large vectors go through a network that this transport drives itself.

        Only in that case does ``allreduce_rounded`` round. Equal on all ranks; False
        until connected.
        """
        ...

    @property
    def waited_s(self) -> float:
        """Seconds this rank has spent waiting for other ranks so far."""
        ...

    @property
    def waiting_for(self) -> tuple[int, ...]:
        """The ranks for which this one is waiting right now."""
        ...

    @property
    def exchanged_bytes(self) -> int:
        """The bytes of data that this rank has contributed to operations so far."""
        ...

    def allreduce(
        self, buffer: Array, op: ReduceOp, source: Array | None = None
    ) -> None:
        """All-reduce contiguous vectors of equal length and dtype into ``buffer``.

        ``buffer`` has shape (n,) and a numeric numpy dtype. ``op`` is one of
        ``UFUNCS``, else KeyError is raised. This rank contributes ``source``, a
        separate vector of the same length and dtype, or else ``buffer`` itself. The
        result is bitwise equal on all ranks.
        """
        ...

    def allreduce_rounded(
        self, buffer: Array, rounding: Rounding, residual: Residual | None
    ) -> None:
        """Sum the ranks' buffers into ``buffer``, rounded between hosts.

        They are contiguous vectors of float32 or float64, of equal length on all ranks.
        With ``residual``, the rounding error is added to the next sum. The result is
        bitwise equal on all ranks.
        """
        ...

    def allgather(self, data: bytes) -> list[bytes]:
        """Every rank's data, of any length, in rank order."""
        ...

    def alltoall(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send ``parts[r]`` to rank r; return what was received, in rank order."""
        ...

    def broadcast(self, data: bytes, root: int) -> bytes:
        """The data of rank ``root``; the data of other ranks is ignored."""
        ...

    def interrupt(self) -> None:
        """Make operations fail that wait for other ranks, here and on other ranks.

        Called from another thread, and repeatedly as long as an operation waits: the
        first call may come before the wait. Also called before ``close`` if this rank
        fails.
        """
        ...

    def close(self) -> None:
        """Disconnect; may be called twice."""
        ...


def flat_bytes(arrays: Sequence[Array]) -> bytes:
    """The arrays' bytes in C order, concatenated; any shapes and dtypes."""
    return b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
