"""Averages float vectors of several hosts, which are sent in two bytes per number.

This is a reduce-scatter and an all-gather by direct exchange: each rank gets one part
of the vector from all others, averages it in float32, rounds it once, and sends it to
all others (Rabenseifner's algorithm; Thakur et al., "Optimization of Collective
Communication Operations in MPICH", 2005). A ring would send the same number of bytes,
but round every sum once for each rank. Numbers are converted in blocks, while the
kernel sends the previous blocks. All ranks get the rounded sums, so they have the same
bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfcluster.runtime.collective.rounding import Residual, Rounding, pool
from tfcluster.runtime.collective.transports.base import Array

_BLOCK = 1 << 17
"""How many numbers to convert at once; half a MiB of float32 fits a core's cache."""


class RoundedExchange:
    """One rank's part of one mean.

    ``vector`` has shape (n,) and dtype float32 or float64, equal on all ranks; it has
    this rank's values, and gets the mean. ``ranks`` lists the participants, including
    ``me``. ``sources`` and ``sinks`` are for ``PeerSockets.transfer``.
    """

    def __init__(
        self,
        me: int,
        ranks: Sequence[int],
        vector: Array,
        rounding: Rounding,
        residual: Residual | None = None,
    ) -> None:
        own, size = ranks.index(me), len(ranks)
        bounds = [len(vector) * part // size for part in range(size + 1)]
        parts = [(bounds[p], bounds[p + 1]) for p in range(size)]
        others = [index for index in range(size) if index != own]
        contributions = _Contributions(vector, rounding)
        received = {
            index: rounding.empty(parts[own][1] - parts[own][0]) for index in others
        }
        owned = _OwnedPart(parts[own], vector, contributions, received, rounding)
        if residual is not None:
            contributions.owed, owned.owed = residual.start(
                len(vector), parts[own][1] - parts[own][0]
            )
        self.sinks = [
            _Sink(ranks[index], index, owned, vector, parts[index], rounding)
            for index in others
        ]
        self.sources = [
            _Source(ranks[index], parts[index], contributions, owned, rounding)
            for index in others
        ]


def _blocks(start: int, end: int) -> list[tuple[int, int]]:
    return [(at, min(at + _BLOCK, end)) for at in range(start, end, _BLOCK)]


class _Contributions:
    """This rank's values, as float32, and the amounts that it owes to their sum."""

    def __init__(self, values: Array, rounding: Rounding) -> None:
        self._values = values
        self._rounding = rounding
        self._scratch = pool.empty(_BLOCK, np.float32)
        self.owed: Array | None = None

    def read(self, start: int, end: int) -> Array:
        """The values from ``start`` to ``end``; valid until the next call."""
        found = self._values[start:end]
        if found.dtype == np.float32:
            return found
        narrow = self._scratch[: end - start]
        with np.errstate(over="ignore"):
            np.copyto(narrow, found, casting="same_kind")
        return narrow

    def rounded(self, start: int, end: int, out: Array) -> None:
        """Write the values to send to ``out``; rounding errors are owed from now on."""
        values = self.read(start, end)
        if self.owed is None:
            self._rounding.to_half(values, out)
            return
        owed = self.owed[start:end]
        with np.errstate(over="ignore", invalid="ignore"):
            owed += values
            self._rounding.to_half(owed, out)
            back = self._scratch[: end - start]
            self._rounding.to_float(out, back)
            owed -= back
        forget_infinities(owed)


def forget_infinities(owed: Array) -> None:
    """Set non-finite values to 0: an infinite gradient must not stay forever."""
    finite = np.isfinite(owed)
    if not finite.all():
        owed[~finite] = 0.0


class _OwnedPart:
    """The part that this rank averages, once all others have arrived."""

    def __init__(
        self,
        part: tuple[int, int],
        vector: Array,
        contributions: _Contributions,
        received: dict[int, Array],
        rounding: Rounding,
    ) -> None:
        self.received = received
        self.sums = rounding.empty(part[1] - part[0])
        """The rounded sums; the first ``done`` are valid."""
        self.done = 0
        self.owed: Array | None = None
        self._start = part[0]
        self._vector = vector
        self._contributions = contributions
        self._rounding = rounding
        self._arrived = dict.fromkeys(received, 0)
        self._total = pool.empty(_BLOCK, np.float32)
        self._term = pool.empty(_BLOCK, np.float32)
        if not received:
            self._sum_to(len(self.sums))

    def arrived(self, index: int, count: int) -> None:
        """Note that the first ``count`` numbers of a rank have arrived."""
        self._arrived[index] = count
        self._sum_to(min(self._arrived.values()))

    def _sum_to(self, ready: int) -> None:
        length = len(self.sums)
        while self.done < length:
            end = min(self.done + _BLOCK, length)
            if end > ready:
                return
            self._sum(self.done, end)
            self.done = end

    def _sum(self, start: int, end: int) -> None:
        total, term = self._total[: end - start], self._term[: end - start]
        at, to = self._start + start, self._start + end
        with np.errstate(over="ignore", invalid="ignore"):
            np.copyto(total, self._contributions.read(at, to))
            for values in self.received.values():
                self._rounding.to_float(values[start:end], term)
                total += term
            total /= 1 + len(self.received)
            if self.owed is not None:
                total += self.owed[start:end]
            sums = self.sums[start:end]
            self._rounding.to_half(total, sums)
            self._rounding.to_float(sums, term)
            if self.owed is not None:
                np.subtract(total, term, out=self.owed[start:end])
                forget_infinities(self.owed[start:end])
        self._vector[at:to] = term


class _Source:
    """Sends our values of another rank's part, and then our sums."""

    def __init__(
        self,
        rank: int,
        part: tuple[int, int],
        contributions: _Contributions,
        owned: _OwnedPart,
        rounding: Rounding,
    ) -> None:
        self.rank = rank
        self._contributions = contributions
        self._owned = owned
        self._blocks = _blocks(*part)
        self._half = rounding.empty(min(_BLOCK, part[1] - part[0]))
        self._block = memoryview(b"")
        self._sums = _bytes_of(owned.sums)
        self._sent = 0
        """Bytes of the sums that have been sent."""

    @property
    def done(self) -> bool:
        """Whether everything has been sent."""
        return not (self._block or self._blocks) and self._sent == len(self._sums)

    def view(self) -> memoryview:
        """The bytes that can be sent now: values, or the sums that are computed."""
        if not self._block and self._blocks:
            start, end = self._blocks.pop(0)
            half = self._half[: end - start]
            self._contributions.rounded(start, end, half)
            self._block = _bytes_of(half)
        if self._block:
            return self._block
        return self._sums[self._sent : self._owned.done * self._half.itemsize]

    def advance(self, count: int) -> None:
        """Note that ``count`` bytes have been sent."""
        if self._block:
            self._block = self._block[count:]
        else:
            self._sent += count


class _Sink:
    """Receives a rank's values of our part, and then its sums."""

    def __init__(
        self,
        rank: int,
        index: int,
        owned: _OwnedPart,
        vector: Array,
        part: tuple[int, int],
        rounding: Rounding,
    ) -> None:
        self.rank = rank
        self._index = index
        self._owned = owned
        self._values = _bytes_of(owned.received[index])
        self._vector = vector
        self._rounding = rounding
        self._blocks = _blocks(*part)
        size = min(_BLOCK, part[1] - part[0])
        self._half = rounding.empty(size)
        self._float = pool.empty(size, np.float32)
        self._fill = 0

    @property
    def done(self) -> bool:
        """Whether everything has been received."""
        return not self._values and not self._blocks

    def view(self) -> memoryview:
        """Memory for the next bytes."""
        if self._values:
            return self._values
        start, end = self._blocks[0]
        return _bytes_of(self._half[: end - start])[self._fill :]

    def advance(self, count: int) -> None:
        """Note that ``count`` bytes have been received."""
        if self._values:
            self._values = self._values[count:]
            whole = self._owned.received[self._index]
            numbers = len(whole) - -(-len(self._values) // whole.itemsize)
            self._owned.arrived(self._index, numbers)
            return
        start, end = self._blocks[0]
        self._fill += count
        if self._fill < (end - start) * self._half.itemsize:
            return
        self._rounding.to_float(self._half[: end - start], self._float[: end - start])
        self._vector[start:end] = self._float[: end - start]
        del self._blocks[0]
        self._fill = 0


def _bytes_of(array: Array) -> memoryview:
    return array.view(np.uint8).data if len(array) else memoryview(b"")
