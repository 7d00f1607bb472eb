"""Shared memory between a training task and a ps on its host, for arrays of messages.

It is an anonymous file (memfd) of the training task, which the ps opens through /proc:
it has no name, cannot shrink, and is freed with the last process that has it. It is
divided into buffers ("rooms"). Client and ps take turns, so that neither reads a buffer
while the other writes to it. If shared memory is not available, everything goes through
the socket.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_NONCE_BYTES = 32


class ShmBuffers:
    """The buffers of one file, each an array of bytes. Its first page holds a nonce."""

    def __init__(self, descriptor: int, sizes: Sequence[int]) -> None:
        self._rooms: list[Array] = []
        self.nonce = os.pread(descriptor, _NONCE_BYTES, 0)
        offset = mmap.PAGESIZE
        for size in map(_pages, sizes):
            memory = mmap.mmap(descriptor, size, offset=offset)
            self._rooms.append(np.frombuffer(memory, np.uint8))
            offset += size
        self._unused = [self._references(index) for index in range(len(sizes))]

    def __getitem__(self, index: int) -> Array:
        return self._rooms[index]

    def is_free(self, index: int) -> bool:
        """Whether no array in this process refers to that buffer."""
        return self._references(index) <= self._unused[index]

    def _references(self, index: int) -> int:
        return sys.getrefcount(self._rooms[index])


class BufferTable(Mapping[int, Array]):
    """All buffers of a connection, by number; keeps no references to their arrays."""

    def __init__(self) -> None:
        self._places: list[tuple[ShmBuffers, int]] = []

    def add(self, rooms: ShmBuffers, count: int) -> None:
        """Add the buffers of a file; they get the next numbers."""
        self._places += [(rooms, index) for index in range(count)]

    def __getitem__(self, number: int) -> Array:
        if not 0 <= number < len(self._places):
            raise KeyError(number)
        rooms, index = self._places[number]
        return rooms[index]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._places)))

    def __len__(self) -> int:
        return len(self._places)

    def is_free(self, number: int) -> bool:
        rooms, index = self._places[number]
        return rooms.is_free(index)


def create(sizes: Sequence[int]) -> tuple[int, ShmBuffers]:
    """Create buffers of these sizes in bytes, and return their descriptor, too.

    Raises OSError if there is not enough memory.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    descriptor = os.memfd_create("tfcluster-parameters", flags)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE + sum(map(_pages, sizes)))
        os.pwrite(descriptor, secrets.token_bytes(_NONCE_BYTES), 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return descriptor, ShmBuffers(descriptor, sizes)
    except BaseException:
        os.close(descriptor)
        raise


def offer(descriptor: int, rooms: ShmBuffers, sizes: Sequence[int]) -> dict[str, Any]:
    """The JSON fields that the other process needs for ``attach``."""
    return {
        "pid": os.getpid(),
        "descriptor": descriptor,
        "nonce": rooms.nonce.hex(),
        "sizes": list(sizes),
    }


def attach(offered: Mapping[str, Any]) -> ShmBuffers:
    """Open the buffers that another process on this host has offered.

    Raises OSError if they cannot be opened, or are not the offered ones.
    """
    sizes = [int(size) for size in offered["sizes"]]
    path = f"/proc/{int(offered['pid'])}/fd/{int(offered['descriptor'])}"
    if not str(Path(path).readlink()).startswith("/memfd:"):
        raise OSError("it is no memory")
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        found = os.fstat(descriptor).st_size
        if not sealed or found != mmap.PAGESIZE + sum(map(_pages, sizes)):
            raise OSError("it has another size")
        rooms = ShmBuffers(descriptor, sizes)
    finally:
        os.close(descriptor)
    if rooms.nonce.hex() != offered["nonce"]:
        raise OSError("it is not the memory of this run")
    return rooms


def _pages(size: int) -> int:
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
