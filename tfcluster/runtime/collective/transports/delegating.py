"""The base of transports that use the host transport for all but large vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from tfcluster.runtime.collective.rounding import Residual, Rounding
from tfcluster.runtime.collective.transports.base import Array, Transport

Host = TypeVar("Host", bound=Transport)


class DelegatingTransport(Generic[Host]):
    """A ``Transport`` that delegates to ``host``, which connects the same ranks."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._elsewhere = False
        self._elsewhere_bytes = 0

    @property
    def rank(self) -> int:
        return self._host.rank

    @property
    def size(self) -> int:
        return self._host.size

    @property
    def several_hosts(self) -> bool:
        """False: another library sends the large vectors."""
        return False

    @property
    def waited_s(self) -> float:
        return self._host.waited_s

    @property
    def waiting_for(self) -> tuple[int, ...]:
        if self._elsewhere:  # Other libraries do not say which rank is late.
            return tuple(rank for rank in range(self.size) if rank != self.rank)
        return self._host.waiting_for

    @property
    def exchanged_bytes(self) -> int:
        """See ``Transport``; the bytes over ``host`` plus the bytes sent elsewhere."""
        return self._host.exchanged_bytes + self._elsewhere_bytes

    @contextmanager
    def elsewhere(self, nbytes: int) -> Iterator[None]:
        """A context in which a vector of this size is reduced without ``host``."""
        self._elsewhere = True
        self._elsewhere_bytes += nbytes
        try:
            yield
        finally:
            self._elsewhere = False

    def prepare(self) -> None:
        """Connect if necessary; called before each use of ``host``."""

    def allreduce_rounded(
        self, buffer: Array, rounding: Rounding, residual: Residual | None
    ) -> None:
        """See ``Transport``; through ``host``."""
        self.prepare()
        self._host.allreduce_rounded(buffer, rounding, residual)

    def allgather(self, data: bytes) -> list[bytes]:
        self.prepare()
        return self._host.allgather(data)

    def alltoall(self, parts: Sequence[bytes]) -> list[bytes]:
        self.prepare()
        return self._host.alltoall(parts)

    def broadcast(self, data: bytes, root: int) -> bytes:
        self.prepare()
        return self._host.broadcast(data, root)

    def interrupt(self) -> None:
        self._host.interrupt()

    def close(self) -> None:
        self._host.close()
