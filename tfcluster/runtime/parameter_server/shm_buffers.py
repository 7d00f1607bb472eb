"""Shared memory between a training task and a ps on its host, for arrays of messages.

It is a file that the training task creates and the ps opens: see ``net.memfd``. It is
divided into buffers. Client and ps take turns, so that neither reads a buffer while the
other writes to it. If shared memory is not available, everything goes through the
socket.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tfcluster.runtime.net import memfd

Bytes: TypeAlias = NDArray[np.uint8]


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
