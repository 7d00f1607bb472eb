"""What transports have in common that leave all but large vectors to ``host``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from tfcluster.runtime.collective.transports.base import Transport

Host = TypeVar("Host", bound=Transport)


class UponHost(Generic[Host]):
    """``host`` connects the same ranks. See ``Transport``."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._elsewhere = False

    @property
    def rank(self) -> int:
        return self._host.rank

    @property
    def size(self) -> int:
        return self._host.size

    @property
    def waited_s(self) -> float:
        return self._host.waited_s

    @property
    def waiting_for(self) -> tuple[int, ...]:
        if self._elsewhere:  # Who is late is not told there.
            return tuple(rank for rank in range(self.size) if rank != self.rank)
        return self._host.waiting_for

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """A vector is reduced by other means than ``host``."""
        self._elsewhere = True
        try:
            yield
        finally:
            self._elsewhere = False

    def prepare(self) -> None:
        """Be able to exchange: called before ``host`` is used."""

    def alltoall(self, parts: Sequence[bytes]) -> list[bytes]:
        self.prepare()
        return self._host.alltoall(parts)

    def broadcast(self, data: bytes, root: int) -> bytes:
        self.prepare()
        return self._host.broadcast(data, root)

    def barrier(self) -> None:
        self.prepare()
        self._host.barrier()

    def interrupt(self) -> None:
        self._host.interrupt()

    def close(self) -> None:
        self._host.close()
