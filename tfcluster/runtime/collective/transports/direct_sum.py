"""Reductions of vectors: each part of them is reduced by the rank that owns it.

The owner of a part gets it from all other ranks, reduces it in their order, and sends
the result to all others: a reduce-scatter, and an all-gather. That is Rabenseifner's
algorithm by direct exchange (Thakur et al., "Optimization of Collective Communication
Operations in MPICH", 2005). Every rank sends 2 (N-1)/N of the vector, as around a ring,
but a number is on the wire only twice, not 2 (N-1) times. And it does not matter for
the bits of a result where the parts begin.

A block of numbers is made when it can be sent, and reduced as soon as all ranks have
sent theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np

from tfcluster.runtime.collective.float_coding import BLOCK, Coder
from tfcluster.runtime.collective.rounding import Residual, Rounding, pool
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.collective.transports.block_streams import (
    BlockSink,
    BlockSource,
    blocks_of,
)

Ends = tuple[list[BlockSource], list[BlockSink]]
"""Sources and sinks for one ``PeerSockets.transfer``."""


class Terms(Protocol):
    """What a rank adds to a reduction, and where it keeps the result.

    ``start`` and ``end`` are the bounds of a block of the vector.
    """

    def empty(self, count: int) -> Array:
        """Memory for what another rank sends; shape (count,)."""

    def sent(self, start: int, end: int) -> Array:
        """What this rank sends of a block to its owner."""

    def reduced(
        self, start: int, end: int, before: Sequence[Array], after: Sequence[Array]
    ) -> Array:
        """Reduce a block that this rank owns; returns what the others get.

        ``before`` and ``after`` have the terms of the ranks before and after this one;
        they may be overwritten.
        """

    def target(self, start: int, end: int) -> Array:
        """Where the result of another rank's block is received."""

    def finish(self, start: int, end: int) -> None:
        """The result of another rank's block has been received."""


class DirectSum:
    """One rank's part of one reduction of contiguous vectors.

    ``ranks`` lists the participants; raises ValueError if ``me`` is not one of them.
    ``ranks[i]`` owns what is from ``bounds[i]`` to ``bounds[i + 1]``. If it ``codes``,
    this rank codes what it sends. Without ``gathers``, each rank gets the result of its
    own part only.
    """

    def __init__(
        self,
        me: int,
        ranks: Sequence[int],
        bounds: Sequence[int],
        terms: Terms,
        coder: Coder,
        *,
        codes: bool,
        gathers: bool = True,
    ) -> None:
        self._place = ranks.index(me)
        self._parts = [list(blocks_of(*part)) for part in pairwise(bounds)]
        self._own = self._parts[self._place]
        self._first = bounds[self._place]
        length = bounds[self._place + 1] - self._first
        self._peers = {p: r for p, r in enumerate(ranks) if r != me}
        self._terms = terms
        self._received = {place: terms.empty(length) for place in self._peers}
        """What other ranks send of our part."""
        self._arrived = dict.fromkeys(self._peers, 0)
        """How many blocks of it have arrived."""
        self._reduced = 0
        """How many of our blocks have been reduced."""
        self._gathers = gathers
        self._sources: list[BlockSource] = []
        self._coder, self._codes = coder, codes

    def ends(self) -> Ends:
        """Sources and sinks. The sinks are not kept here: such a cycle would keep the
        vectors, too.
        """
        sinks = []
        for place, rank in self._peers.items():
            theirs, count = self._parts[place], len(self._parts[place])
            terms = (self._terms.sent(*block) for block in theirs)
            targets = [self._term(place, *block) for block in self._own]
            if self._gathers:
                count += len(self._own)
                targets += [self._terms.target(*block) for block in theirs]
            sinks.append(
                BlockSink(rank, targets, partial(self._finish, place), self._coder)
            )
            coder = self._coder if self._codes else None
            self._sources.append(BlockSource(rank, terms, count, coder))
        return self._sources, sinks

    def _term(self, place: int, start: int, end: int) -> Array:
        return self._received[place][start - self._first : end - self._first]

    def _finish(self, place: int, number: int, _: Array) -> None:
        """A rank has sent its term of a block of our part, or the result of its own.

        The former come first.
        """
        own = len(self._own)
        if number >= own:
            self._terms.finish(*self._parts[place][number - own])
            return
        self._arrived[place] += 1
        while self._reduced < min(self._arrived.values()):
            block = self._own[self._reduced]
            terms = {peer: self._term(peer, *block) for peer in self._peers}
            before = [term for peer, term in terms.items() if peer < self._place]
            after = [term for peer, term in terms.items() if peer > self._place]
            result = self._terms.reduced(*block, before, after)
            self._reduced += 1
            if self._gathers:
                for source in self._sources:
                    source.add(result)


def gathering(
    me: int,
    ranks: Sequence[int],
    bounds: Sequence[int],
    vector: Array,
    coder: Coder,
    *,
    codes: bool,
) -> Ends:
    """Sources and sinks for the all-gather of the parts of ``vector``.

    ``bounds``, ``ranks`` and errors are as for ``DirectSum``.
    """
    parts = [list(blocks_of(*part)) for part in pairwise(bounds)]
    own = parts[ranks.index(me)]
    sources, sinks = [], []
    for rank, theirs in zip(ranks, parts, strict=True):
        if rank != me:
            blocks: Iterator[Array] = (vector[start:end] for start, end in own)
            sources.append(
                BlockSource(rank, blocks, len(own), coder if codes else None)
            )
            targets = [vector[start:end] for start, end in theirs]
            sinks.append(BlockSink(rank, targets, lambda *_: None, coder))
    return sources, sinks


class PlainTerms:
    """The terms of a reduction in the vectors' own dtype, a numeric one of numpy.

    ``source`` is this rank's term, and ``vector`` gets the result: shape (n,), both. It
    may be the same memory, since a rank gets the result of a block after it has sent
    its term.
    """

    def __init__(self, vector: Array, source: Array, ufunc: np.ufunc) -> None:
        self._vector = vector
        self._source = source
        self._ufunc = ufunc

    def empty(self, count: int) -> Array:
        """See ``Terms``."""
        return pool.empty(count, self._vector.dtype)

    def sent(self, start: int, end: int) -> Array:
        """See ``Terms``."""
        return self._source[start:end]

    def reduced(
        self, start: int, end: int, before: Sequence[Array], after: Sequence[Array]
    ) -> Array:
        """See ``Terms``."""
        own: Array = self._source[start:end]
        terms = [*before, own, *after]
        first, others = terms[0], terms[1:]
        total = self._vector[start:end]
        # An overflow is infinite on one machine, too.
        with np.errstate(over="ignore", invalid="ignore"):
            for number, term in enumerate(others, 1):
                # Our own term may lie where the result will be.
                is_last = number == len(others)
                out = total if is_last or not before else first
                first = self._ufunc(first, term, out=out)
        return total

    def target(self, start: int, end: int) -> Array:
        """See ``Terms``."""
        return self._vector[start:end]

    def finish(self, start: int, end: int) -> None:
        """See ``Terms``."""


class RoundedTerms:
    """The terms of a sum for which ranks send two bytes for each number.

    The sum is computed in float32, and rounded once; around a ring, it would be rounded
    once for each rank. ``vector`` has float32 or float64, shape (n,), and gets the sum.
    ``own`` are the bounds of this rank's part, one of ``size``. With ``residual``, the
    rounding error is added to the next sum.
    """

    def __init__(
        self,
        vector: Array,
        own: tuple[int, int],
        size: int,
        rounding: Rounding,
        residual: Residual | None,
    ) -> None:
        self._vector = vector
        self._rounding = rounding
        # The mean of so many times a rank's term is the sum. What is rounded is then as
        # large as the sum, not smaller: float16 has few bits for small numbers.
        self._size = np.float32(size)
        self._half = rounding.empty(len(vector))
        """What is sent of the other ranks' parts, then all ranks' rounded sums."""
        self._sent = self._total = None
        self._first, end = own
        if residual is not None:
            self._sent, self._total = residual.start(len(vector), end - self._first)
        self._values = pool.empty(min(BLOCK, len(vector)), np.float32)
        self._other = pool.empty(min(BLOCK, len(vector)), np.float32)

    def empty(self, count: int) -> Array:
        """See ``Terms``."""
        return self._rounding.empty(count)

    def sent(self, start: int, end: int) -> Array:
        """See ``Terms``."""
        owed = None if self._sent is None else self._sent[start:end]
        return self._to_half(self._own(start, end), start, end, owed)

    def reduced(
        self, start: int, end: int, before: Sequence[Array], after: Sequence[Array]
    ) -> Array:
        """See ``Terms``."""
        total, term = self._own(start, end), self._other[: end - start]
        with np.errstate(over="ignore", invalid="ignore"):
            for rounded in (*before, *after):
                self._rounding.to_float(rounded, term)
                total += term
            total /= self._size
        within = slice(start - self._first, end - self._first)
        owed = None if self._total is None else self._total[within]
        result = self._to_half(total, start, end, owed)
        self.finish(start, end)
        return result

    def target(self, start: int, end: int) -> Array:
        """See ``Terms``."""
        return self._half[start:end]

    def finish(self, start: int, end: int) -> None:
        """See ``Terms``."""
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
