"""The sum of vectors of several ranks, which send two bytes for each number.

Each rank gets one part of the vector from all others, adds it up in float32, rounds it
once, and sends it to all others (Rabenseifner's algorithm; Thakur et al., "Optimization
of Collective Communication Operations in MPICH", 2005). A ring would send the same
number of bytes, but round every sum once for each rank.

A block of numbers is rounded when it can be sent, while those before it are on the
wire; and it is added up as soon as all ranks have sent theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfcluster.runtime.collective.rounding import Residual, Rounding, pool
from tfcluster.runtime.collective.transports.base import Array

_BLOCK = 1 << 17
"""Numbers that are rounded at once: they should fit in a core's cache."""


class RoundedSum:
    """One rank's part of one sum of contiguous vectors of float32 or float64.

    ``vector`` has shape (n,), equal on all ``ranks``, and gets the sum, of the same
    bits on all of them. With ``residual``, the rounding error is added to the next sum.
    ``sources`` and ``sinks`` are for ``PeerSockets.transfer``.
    """

    def __init__(
        self,
        me: int,
        ranks: Sequence[int],
        vector: Array,
        rounding: Rounding,
        residual: Residual | None,
    ) -> None:
        own, size = ranks.index(me), len(ranks)
        bounds = [len(vector) * part // size for part in range(size + 1)]
        self._vector = vector
        self._rounding = rounding
        # The mean of so many times a rank's term is the sum. What is rounded is then as
        # large as the sum, not smaller: float16 has few bits for small numbers.
        self._size = np.float32(size)
        self.first, self.last = bounds[own], bounds[own + 1]
        self.half = rounding.empty(len(vector))
        """What is sent of the other ranks' parts, then all ranks' rounded sums."""
        self._sent = self._total = None
        if residual is not None:
            self._sent, self._total = residual.start(
                len(vector), self.last - self.first
            )
        length = min(_BLOCK, len(vector))
        self._values = pool.empty(length, np.float32)
        self._other = pool.empty(length, np.float32)
        self.summed = self.first
        """The end of what has been added up of the own part."""
        peers = [place for place in range(size) if place != own]
        self.sinks = [
            _Incoming(ranks[p], self, bounds[p], bounds[p + 1]) for p in peers
        ]
        self.sources = [
            _Outgoing(ranks[p], self, bounds[p], bounds[p + 1]) for p in peers
        ]

    def terms(self) -> Array:
        """Memory for what another rank sends of the own part."""
        return self._rounding.empty(self.last - self.first)

    def round(self, start: int, end: int) -> None:
        """Round a block of another rank's part."""
        owed = None if self._sent is None else self._sent[start:end]
        self._to_half(self._own(start, end), start, end, owed)

    def add_up(self) -> None:
        """Add up and round the blocks of the own part that all ranks have sent."""
        arrived = min(sink.arrived for sink in self.sinks)
        while self.summed < arrived:
            start, end = self.summed, min(arrived, self.summed + _BLOCK)
            total, term = self._own(start, end), self._other[: end - start]
            begin, stop = start - self.first, end - self.first
            with np.errstate(over="ignore", invalid="ignore"):
                for sink in self.sinks:
                    self._rounding.to_float(sink.terms[begin:stop], term)
                    total += term
                total /= self._size
            owed = None if self._total is None else self._total[begin:stop]
            self._to_half(total, start, end, owed)
            self.finish(start, end)
            self.summed = end

    def finish(self, start: int, end: int) -> None:
        """Take over a block of rounded sums."""
        self._rounding.to_float(self.half[start:end], self._vector[start:end])

    def _own(self, start: int, end: int) -> Array:
        """This rank's values, times the number of ranks."""
        values = self._values[: end - start]
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(
                self._vector[start:end], self._size, out=values, casting="unsafe"
            )
        return values

    def _to_half(self, values: Array, start: int, end: int, owed: Array | None) -> None:
        """Round values and what is owed to them; the error is owed from then on."""
        half = self.half[start:end]
        if owed is None:
            self._rounding.to_half(values, half)
            return
        with np.errstate(over="ignore", invalid="ignore"):
            owed += values
            self._rounding.to_half(owed, half)
            self._rounding.to_float(half, values)
            owed -= values
        # An infinite gradient must not stay forever.
        owed[~np.isfinite(owed)] = 0.0


class _Outgoing:
    """Sends a rank our values of its part, and then the sums of our part."""

    def __init__(self, rank: int, whole: RoundedSum, start: int, end: int) -> None:
        self.rank = rank
        self._whole = whole
        self._data = _bytes_of(whole.half)
        self._rounded, self._end = start, end
        self._is_first = start < end
        self._position = 2 * (start if self._is_first else whole.first)

    @property
    def done(self) -> bool:
        """See ``PendingBytes``."""
        return not self._is_first and self._position == 2 * self._whole.last

    def view(self) -> memoryview:
        """See ``PendingBytes``."""
        if not self._is_first:
            return self._data[self._position : 2 * self._whole.summed]
        if self._position == 2 * self._rounded:
            start, end = self._rounded, min(self._end, self._rounded + _BLOCK)
            self._whole.round(start, end)
            self._rounded = end
        return self._data[self._position : 2 * self._rounded]

    def advance(self, count: int) -> None:
        """See ``PendingBytes``."""
        self._position += count
        if self._is_first and self._position == 2 * self._end:
            self._is_first = False
            self._position = 2 * self._whole.first


class _Incoming:
    """Receives a rank's values of our part, and then the sums of its part.

    A rank sends the sum of a block only after it has got our values of it. So the sum
    may take their place in memory.
    """

    def __init__(self, rank: int, whole: RoundedSum, start: int, end: int) -> None:
        self.rank = rank
        self._whole = whole
        self.terms = whole.terms()
        self.arrived = whole.first
        """The end of what has arrived of our part."""
        self._finished, self._end = start, end
        self._fill = 0
        """How many bytes of the current block have arrived."""

    @property
    def _is_first(self) -> bool:
        return self.arrived < self._whole.last

    @property
    def done(self) -> bool:
        """See ``Sink``."""
        return not self._is_first and self._finished == self._end

    def view(self) -> memoryview:
        """See ``Sink``."""
        whole = self._whole
        if self._is_first:
            block = self.terms[self.arrived - whole.first :]
        else:
            block = whole.half[self._finished : self._end]
        return _bytes_of(block[:_BLOCK])[self._fill :]

    def advance(self, count: int) -> None:
        """See ``Sink``."""
        self._fill += count
        whole = self._whole
        if self._is_first:
            end = min(self.arrived + _BLOCK, whole.last)
            if self._fill == 2 * (end - self.arrived):
                self.arrived, self._fill = end, 0
                whole.add_up()
        else:
            end = min(self._finished + _BLOCK, self._end)
            if self._fill == 2 * (end - self._finished):
                whole.finish(self._finished, end)
                self._finished, self._fill = end, 0


def _bytes_of(half: Array) -> memoryview:
    return half.view(np.uint8).data if len(half) else memoryview(b"")
