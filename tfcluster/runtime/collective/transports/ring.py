"""Ring all-reduce: each rank sends to its successor and receives from its predecessor.

The vector is cut into one part for each rank. Each part travels around the ring once to
be reduced (reduce-scatter) and once more as the result (all-gather), so that every rank
sends 2 (N-1)/N of the vector; see Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009. In each round, a rank sends the part
that it received in the previous round. So both directions are plain streams, and a
block may be forwarded as soon as it has been received and combined. Every part is
reduced in a fixed order, so all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfcluster.runtime.collective.float_coding import Coder
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.collective.transports.block_streams import (
    BlockSink,
    BlockSource,
    blocks_of,
)


class Ring:
    """One rank's part of one all-reduce of a contiguous vector.

    ``vector`` has shape (n,) and a numeric numpy dtype, equal on all ranks. ``ranks``
    lists the participants in their order around the ring; raises ValueError if ``me``
    is not one of them. ``source`` is this rank's contribution; it may be the same
    memory as ``vector``, which gets the result. If it ``codes``, this rank codes what
    it sends.
    """

    def __init__(
        self,
        me: int,
        ranks: Sequence[int],
        vector: Array,
        ufunc: np.ufunc,
        source: Array,
        coder: Coder,
        *,
        codes: bool,
    ) -> None:
        rank, size = ranks.index(me), len(ranks)
        bounds = [len(vector) * part // size for part in range(size + 1)]
        parts = [list(blocks_of(*bounds[part : part + 2])) for part in range(size)]
        received = [parts[(rank - 1 - step) % size] for step in range(2 * (size - 1))]
        self._blocks = [block for part in received for block in part]
        self._sums = sum(len(part) for part in received[: size - 1])
        """How many of them are sums to which our values are added; others are final."""
        self._forwarded = sum(len(part) for part in received[:-1])
        """How many of them have not been at all ranks yet."""
        self._vector = vector
        self._source = source
        self._ufunc = ufunc
        # Our own values are read only once, and what is added to them stays in a core's
        # cache: it is received at the position of its result, unless they are there.
        self._is_apart = not np.may_share_memory(vector, source)
        longest = max((end - start for start, end in self._blocks), default=0)
        self._scratch = np.empty(0 if self._is_apart else longest, vector.dtype)
        own = (source[start:end] for start, end in parts[rank])
        count = len(parts[rank]) + self._forwarded
        self._next = BlockSource(
            ranks[(rank + 1) % size], own, count, coder if codes else None
        )
        self._before = ranks[(rank - 1) % size]
        self._coder = coder

    def ends(self) -> tuple[list[BlockSource], list[BlockSink]]:
        """Sources and sinks for one ``PeerSockets.transfer``.

        They are not kept here: such a cycle would keep the vectors, too.
        """
        targets = map(self._target, range(len(self._blocks)))
        sink = BlockSink(self._before, targets, self._finish, self._coder)
        return [self._next], [sink]

    def _target(self, number: int) -> Array:
        """Where a block is received."""
        start, end = self._blocks[number]
        if number < self._sums and not self._is_apart:
            return self._scratch[: end - start]
        return self._vector[start:end]

    def _finish(self, number: int, arrived: Array) -> None:
        if number < self._sums:
            start, end = self._blocks[number]
            term, total = self._source[start:end], self._vector[start:end]
            self._ufunc(term, self._target(number), out=total)
            arrived = total
        if number < self._forwarded:
            self._next.add(arrived)
