"""Ring all-reduce: each rank sends to its successor and receives from its predecessor.

The vector is cut into one part for each rank. Each part travels around the ring once to
be reduced (reduce-scatter) and once more as the result (all-gather), so that every rank
sends 2 (N-1)/N of the vector; see Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009. In each round, a rank sends the part
that it received in the previous round. So both directions are plain streams, and a byte
may be forwarded as soon as it has been received and combined. Every part is reduced in
a fixed order, so all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfcluster.runtime.collective.transports.base import Array

_BLOCK_BYTES = 1 << 21
"""The number of bytes to receive before combining them.

Larger blocks mean fewer calls and context switches, but should fit in a core's cache.
"""


class Ring:
    """One rank's part of one all-reduce of a contiguous vector.

    ``vector`` has shape (n,) and a numeric numpy dtype, equal on all ranks. ``ranks``
    lists the participants in their order around the ring; raises ValueError if ``me``
    is not one of them. ``source`` is this rank's contribution; it may be the same
    memory as ``vector``, which gets the result. ``sources`` and ``sinks`` are for
    ``PeerSockets.transfer``.
    """

    def __init__(
        self,
        me: int,
        ranks: Sequence[int],
        vector: Array,
        ufunc: np.ufunc,
        source: Array,
    ) -> None:
        rank, size = ranks.index(me), len(ranks)
        bounds = [len(vector) * part // size for part in range(size + 1)]
        item = vector.itemsize
        parts = [(bounds[p] * item, bounds[p + 1] * item) for p in range(size)]
        rounds = 2 * (size - 1)
        outgoing = [parts[(rank - step) % size] for step in range(rounds)]
        incoming = [parts[(rank - 1 - step) % size] for step in range(rounds)]
        own_bytes = outgoing[0][1] - outgoing[0][0]
        data = _bytes_of(vector)
        sink = RingSink(
            ranks[(rank - 1) % size],
            data,
            _Combination(vector, source, ufunc, incoming[: size - 1]),
            incoming[size - 1 :],
        )
        source_end = RingSource(
            ranks[(rank + 1) % size],
            _bytes_of(source),
            data,
            outgoing,
            own_bytes,
            sink,
        )
        self.sources, self.sinks = [source_end], [sink]


def _bytes_of(vector: Array) -> memoryview:
    return vector.data.cast("B") if len(vector) else memoryview(b"")


class RingSource:
    """Forwards parts as they arrive; the first ``own_bytes`` bytes are our own part."""

    def __init__(
        self,
        rank: int,
        own: memoryview,
        data: memoryview,
        parts: list[tuple[int, int]],
        own_bytes: int,
        sink: RingSink,
    ) -> None:
        self.rank = rank
        self._own = own if own_bytes else data
        self._data = data
        self._parts = [part for part in parts if part[0] < part[1]]
        self._index = 0
        self._position = self._parts[0][0] if self._parts else 0
        self._own_bytes = own_bytes
        self._sink = sink
        self._sent = 0

    @property
    def done(self) -> bool:
        return self._index == len(self._parts)

    def view(self) -> memoryview:
        available = self._own_bytes + self._sink.processed - self._sent
        end = min(self._parts[self._index][1], self._position + available)
        data = self._own if self._index == 0 else self._data
        return data[self._position : end]

    def advance(self, count: int) -> None:
        self._sent += count
        self._position += count
        if self._position == self._parts[self._index][1]:
            self._index += 1
            if not self.done:
                self._position = self._parts[self._index][0]


class _Combination:
    """The reduce-scatter half of the incoming stream, combined block by block.

    A block is received at the position of its result, unless our own values are there.
    So our own values are read only once, and everything else stays in a core's cache.
    """

    def __init__(
        self,
        vector: Array,
        source: Array,
        ufunc: np.ufunc,
        parts: list[tuple[int, int]],
    ) -> None:
        item = vector.itemsize
        block = max(1, _BLOCK_BYTES // item) * item
        self.blocks = [
            (start, min(start + block, end))
            for begin, end in parts
            for start in range(begin, end, block)
        ]
        longest = max((end - start for start, end in self.blocks), default=0)
        self._scratch = np.empty(longest // item, vector.dtype)
        self._is_separate = not np.may_share_memory(vector, source)
        self._receive_buffer = _bytes_of(vector if self._is_separate else self._scratch)
        self._vector = vector
        self._source = source
        self._ufunc = ufunc

    def receive_buffer(self, start: int, end: int) -> memoryview:
        """The memory that receives a block."""
        offset = start if self._is_separate else 0
        return self._receive_buffer[offset : offset + end - start]

    def combine(self, start: int, end: int) -> None:
        item = self._vector.itemsize
        first, last = start // item, end // item
        target = self._vector[first:last]
        received = target if self._is_separate else self._scratch[: len(target)]
        self._ufunc(self._source[first:last], received, out=target)


class RingSink:
    """Receives parts: first blocks to be combined, later final values."""

    def __init__(
        self,
        rank: int,
        data: memoryview,
        combination: _Combination,
        finished: list[tuple[int, int]],
    ) -> None:
        self.rank = rank
        self.processed = 0
        """The number of bytes that have arrived and may be forwarded."""
        self._data = data
        self._combination = combination
        self._combined_blocks = len(combination.blocks)
        self._blocks = combination.blocks + [p for p in finished if p[0] < p[1]]
        self._index = 0
        self._fill = 0

    @property
    def done(self) -> bool:
        return self._index == len(self._blocks)

    @property
    def _combines(self) -> bool:
        return self._index < self._combined_blocks

    def view(self) -> memoryview:
        start, end = self._blocks[self._index]
        if self._combines:
            return self._combination.receive_buffer(start, end)[self._fill :]
        return self._data[start + self._fill : end]

    def advance(self, count: int) -> None:
        start, end = self._blocks[self._index]
        self._fill += count
        complete = self._fill == end - start
        if not self._combines:
            self.processed += count
        elif complete:
            self._combination.combine(start, end)
            self.processed += end - start
        if complete:
            self._index += 1
            self._fill = 0
