"""The sum of vectors of several ranks, which send two bytes for each number.

Each rank gets one part of the vector from all others, adds it up in float32, rounds it
once, and sends it to all others (Rabenseifner's algorithm; Thakur et al., "Optimization
of Collective Communication Operations in MPICH", 2005). A ring would send the same
number of bytes, but round every sum once for each rank.

A block of numbers is rounded when it can be sent, and added up as soon as all ranks
have sent theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from tfcluster.runtime.collective.float_coding import BLOCK, Coder
from tfcluster.runtime.collective.rounding import Residual, Rounding, pool
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.collective.transports.block_streams import (
    BlockSink,
    BlockSource,
    blocks_of,
)


class RoundedSum:
    """One rank's part of one sum of contiguous vectors of float32 or float64.

    ``vector`` has shape (n,), equal on all ``ranks``, and gets the sum, of the same
    bits on all of them. With ``residual``, the rounding error is added to the next sum.
    If it ``codes``, this rank codes what it sends.
    """

    def __init__(
        self,
        me: int,
        ranks: Sequence[int],
        vector: Array,
        rounding: Rounding,
        residual: Residual | None,
        coder: Coder,
        *,
        codes: bool,
    ) -> None:
        own, size = ranks.index(me), len(ranks)
        bounds = [len(vector) * part // size for part in range(size + 1)]
        self._vector = vector
        self._rounding = rounding
        # The mean of so many times a rank's term is the sum. What is rounded is then as
        # large as the sum, not smaller: float16 has few bits for small numbers.
        self._size = np.float32(size)
        self._first = bounds[own]
        length = bounds[own + 1] - self._first
        self._half = rounding.empty(len(vector))
        """What is sent of the other ranks' parts, then all ranks' rounded sums.

        A rank sends the sum of a block only after it has got our values of it. So the
        sum may take their place.
        """
        self._sent = self._total = None
        if residual is not None:
            self._sent, self._total = residual.start(len(vector), length)
        self._values = pool.empty(min(BLOCK, len(vector)), np.float32)
        self._other = pool.empty(min(BLOCK, len(vector)), np.float32)
        self._parts = [list(blocks_of(*bounds[p : p + 2])) for p in range(size)]
        self._own_blocks = self._parts[own]
        self._summed = 0
        """How many of our blocks have been added up."""
        self._peers = {p: ranks[p] for p in range(size) if p != own}
        self._terms = {place: rounding.empty(length) for place in self._peers}
        """What other ranks send of our part."""
        self._arrived = dict.fromkeys(self._peers, 0)
        """How many blocks of it have arrived."""
        self._sources: list[BlockSource] = []
        self._coder, self._codes = coder, codes

    def ends(self) -> tuple[list[BlockSource], list[BlockSink]]:
        """Sources and sinks for one ``PeerSockets.transfer``.

        Sinks are not kept here: such a cycle would keep the vectors, too.
        """
        sinks = []
        for place, rank in self._peers.items():
            theirs, terms = self._parts[place], self._terms[place]
            rounded = (self._rounded(start, end) for start, end in theirs)
            targets = [terms[self._in_part(*block)] for block in self._own_blocks]
            targets += [self._half[start:end] for start, end in theirs]
            finish = partial(self._finish, place)
            sinks.append(BlockSink(rank, targets, finish, self._coder))
            count = len(theirs) + len(self._own_blocks)
            coder = self._coder if self._codes else None
            self._sources.append(BlockSource(rank, rounded, count, coder))
        return self._sources, sinks

    def _finish(self, place: int, number: int, _: Array) -> None:
        """A rank has sent its values of a block of our part, or the sum of one of its.

        The former come first.
        """
        if number < len(self._own_blocks):
            self._arrived[place] += 1
            while self._summed < min(self._arrived.values()):
                self._add_up(*self._own_blocks[self._summed])
                self._summed += 1
        else:
            self._take_over(*self._parts[place][number - len(self._own_blocks)])

    def _in_part(self, start: int, end: int) -> slice:
        return slice(start - self._first, end - self._first)

    def _rounded(self, start: int, end: int) -> Array:
        """A block of another rank's part."""
        owed = None if self._sent is None else self._sent[start:end]
        return self._to_half(self._own(start, end), start, end, owed)

    def _add_up(self, start: int, end: int) -> None:
        """Add up, round and send a block of our part."""
        within = self._in_part(start, end)
        total, term = self._own(start, end), self._other[: end - start]
        with np.errstate(over="ignore", invalid="ignore"):
            for terms in self._terms.values():
                self._rounding.to_float(terms[within], term)
                total += term
            total /= self._size
        owed = None if self._total is None else self._total[within]
        rounded = self._to_half(total, start, end, owed)
        for source in self._sources:
            source.add(rounded)
        self._take_over(start, end)

    def _take_over(self, start: int, end: int) -> None:
        self._rounding.to_float(self._half[start:end], self._vector[start:end])

    def _own(self, start: int, end: int) -> Array:
        """This rank's values, times the number of ranks."""
        values = self._values[: end - start]
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(
                self._vector[start:end], self._size, out=values, casting="unsafe"
            )
        return values

    def _to_half(
        self, values: Array, start: int, end: int, owed: Array | None
    ) -> Array:
        """Round values and what is owed to them; the error is owed from then on."""
        half = self._half[start:end]
        if owed is None:
            self._rounding.to_half(values, half)
            return half
        with np.errstate(over="ignore", invalid="ignore"):
            owed += values
            self._rounding.to_half(owed, half)
            self._rounding.to_float(half, values)
            owed -= values
        # An infinite gradient must not stay forever.
        owed[~np.isfinite(owed)] = 0.0
        return half
