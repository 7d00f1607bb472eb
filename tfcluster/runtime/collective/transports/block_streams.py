"""Streams of blocks of numbers, which a rank may code.

Before each block, four bytes say how many bytes it has; if these are fewer than it has
in memory, it is coded. A block is made, and coded, when it can be sent, while those
before it are on the wire. ``PeerSockets.transfer`` moves the bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from tfcluster.runtime.collective import float_coding
from tfcluster.runtime.collective.float_coding import BLOCK, Coder
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.errors import CollectiveError
from tfcluster.runtime.net.buffer_pool import Pool

_LENGTH_BYTES = 4
_BLOCKS, _LEAST = 4, 1 << 15
"""Into how many blocks a vector is divided, but not into those of fewer numbers."""
_pool = Pool()


def blocks_of(start: int, end: int) -> Iterator[tuple[int, int]]:
    """The bounds of the blocks from one number of a vector to another.

    Few large blocks take less time. But a rank can combine and forward the first blocks
    only while it receives others.
    """
    size = min(max((end - start) // _BLOCKS, _LEAST), BLOCK)
    for first in range(start, end, size):
        yield first, min(first + size, end)


class BlockSource:
    """Sends ``count`` blocks to a rank: first ``own``, then those that are added.

    They are contiguous vectors. ``coder`` codes those of a dtype that it supports.
    """

    def __init__(
        self, rank: int, own: Iterable[Array], count: int, coder: Coder | None
    ) -> None:
        self.rank = rank
        self._own = iter(own)
        self._left = count
        self._coder = coder
        self._added: deque[Array] = deque()
        self._views: list[memoryview] = []
        """What is left of the block that is being sent."""
        self._coded = np.empty(0, np.uint8)

    def add(self, block: Array) -> None:
        """Send a block, which stays as it is until then, or its coded bytes."""
        self._added.append(block)

    @property
    def done(self) -> bool:
        """See ``PendingBytes``."""
        return not self._left

    def view(self) -> memoryview:
        """See ``PendingBytes``."""
        if not self._views:
            block = next(self._own, None)
            if block is None and self._added:
                block = self._added.popleft()
            if block is None:
                return memoryview(b"")
            data = self._bytes_of(block)
            length = len(data).to_bytes(_LENGTH_BYTES, "big")
            self._views = [memoryview(length), data]
        return self._views[0]

    def advance(self, count: int) -> None:
        """See ``PendingBytes``."""
        rest = self._views[0][count:]
        if rest:
            self._views[0] = rest
            return
        del self._views[0]
        if not self._views:
            self._left -= 1

    def _bytes_of(self, block: Array) -> memoryview:
        """The bytes of a block: coded, if that makes them fewer."""
        if self._coder is not None and float_coding.is_coded(block.dtype):
            most = float_coding.most_bytes(len(block), block.itemsize)
            if len(self._coded) < most:
                self._coded = np.empty(most, np.uint8)
            count = self._coder.code(block, self._coded)
            if 0 < count < block.nbytes:
                return self._coded.data[:count]
        return _memory_of(block)


class BlockSink:
    """Receives blocks from a rank, each into one of ``targets``.

    They are contiguous vectors, not empty, of any dtype; the same memory may occur
    several times. ``finish`` is called when a block has arrived, with its number, and
    with what has arrived: the target, or new memory of dtype uint8 that has the coded
    bytes.
    """

    def __init__(
        self,
        rank: int,
        targets: Iterable[Array],
        finish: Callable[[int, Array], None],
        coder: Coder,
    ) -> None:
        self.rank = rank
        self._targets = deque(targets)
        self._finish = finish
        self._coder = coder
        self._number = 0
        self._length = bytearray(_LENGTH_BYTES)
        self._rest = memoryview(self._length)
        """The memory for what is missing of the length, and then of the block."""
        self._data: Array | None = None
        """The memory of the block; None until its length is known."""

    @property
    def done(self) -> bool:
        """See ``Sink``."""
        return not self._targets

    @property
    def expected_bytes(self) -> int:
        """See ``Sink``."""
        if self._data is None:  # The block follows its length.
            return self._targets[0].nbytes // float_coding.SHRINKS_LESS_THAN
        return len(self._rest)

    def view(self) -> memoryview:
        """See ``Sink``."""
        return self._rest

    def advance(self, count: int) -> None:
        """See ``Sink``. Raises CollectiveError if a block has an impossible length."""
        self._rest = self._rest[count:]
        if self._rest:
            return
        target = self._targets[0]
        if self._data is None:
            length = int.from_bytes(self._length, "big")
            if not 0 < length <= target.nbytes:
                raise CollectiveError(
                    f"rank {self.rank} announced {length} bytes of {target.nbytes}"
                )
            self._data = target
            if length < target.nbytes:
                self._data = _pool.empty(target.nbytes, np.uint8)[:length]
            self._rest = _memory_of(self._data)
            return
        arrived, self._data = self._data, None
        self._rest = memoryview(self._length)
        self._targets.popleft()
        if arrived is not target:
            self._coder.decode(arrived, target)
        number, self._number = self._number, self._number + 1
        self._finish(number, arrived)


def _memory_of(block: Array) -> memoryview:
    return block.view(np.uint8).data  # Not every dtype has a buffer of its own.
