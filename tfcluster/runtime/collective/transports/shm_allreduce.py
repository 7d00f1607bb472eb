"""Collective operations among the ranks of one host, through shared memory.

An all-reduce cuts the vector into one shard for each of the ``owners``, and every shard
into pieces. In round k every rank writes its k-th piece of the other owners' shards to
shared memory; each owner adds up its piece and writes the result; every rank reads the
results. Rounds overlap, so that ranks seldom wait, and pieces are small enough to stay
in the cache. Each shard is reduced by one rank in a fixed order, so all ranks get the
same bits.

A slot is overwritten after ``SLOTS`` pieces. By then all ranks have read it, because no
rank is ever two rounds ahead of the slowest; the order of steps below ensures that.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.collective.transports.shm_barrier import (
    SLOTS,
    ProgressCounters,
    ShmSegment,
)

_Bounds = tuple[int, int]

_AT_ONCE_BYTES = 1 << 14


class ShmCollectives:
    """Member ``me`` of the ranks that share a segment.

    Every method raises PeerLostError if a member has left, and CollectiveTimeoutError
    after ``timeout_s`` seconds. The all-reduce is Rabenseifner's (reduce-scatter and
    all-gather; Thakur et al., "Optimization of Collective Communication Operations in
    MPICH", 2005), pipelined in pieces.
    """

    def __init__(
        self, segment: ShmSegment, me: int, progress: ProgressCounters, timeout_s: float
    ) -> None:
        self.me = me
        self.members = segment.members
        self.progress = progress
        self._segment = segment
        self._timeout_s = timeout_s
        self._others = [m for m in range(segment.members) if m != me]
        self._written = 0
        """The number of pieces written so far, which determines the next slot."""

    # --- small data ------------------------------------------------------------------

    def allgather(self, data: bytes) -> list[bytes]:
        """Every member's data, of any length, in the order of members."""
        own_data = np.frombuffer(data, np.uint8)
        slot_bytes = self.members * self._segment.piece_bytes
        pieces: list[list[bytes]] = [[] for _ in range(self.members)]
        lengths = [0] * self.members
        start = 0
        while True:
            slot = self._written % SLOTS
            self._written += 1
            portion = own_data[start : start + slot_bytes]
            self._segment.lengths[self.me][slot] = len(own_data)
            self._segment.pieces[self.me][slot][: len(portion)] = portion
            self.progress.done()
            self._wait(self.progress.step)
            for member in self._others:
                lengths[member] = int(self._segment.lengths[member][slot])
                size = min(slot_bytes, lengths[member] - start)
                if size > 0:
                    piece = self._segment.pieces[member][slot][:size]
                    pieces[member].append(piece.tobytes())
            start += slot_bytes
            if max(len(own_data), *lengths) <= start:
                break
        return [
            data if member == self.me else b"".join(pieces[member])
            for member in range(self.members)
        ]

    def fits_at_once(self, nbytes: int) -> bool:
        """Whether ``allreduce_at_once`` is the faster way for a vector of this size."""
        most = self.members * self._segment.piece_bytes if self.members == 2 else 0
        return nbytes <= max(most, _AT_ONCE_BYTES)

    def allreduce_at_once(self, vector: Array, ufunc: np.ufunc, source: Array) -> None:
        """All-reduce in which every member reduces the whole vector, in member order.

        For two members, this moves hardly more bytes than dividing the vector into
        shards would, and each member waits only once.
        """
        slot = self._written % SLOTS
        self._written += 1
        size = vector.nbytes
        first, *others = [
            self._segment.pieces[member][slot][:size].view(vector.dtype)
            for member in range(self.members)
        ]
        [first, *others][self.me][:] = source
        self.progress.done()
        self._wait(self.progress.step)
        for piece in others:
            ufunc(first, piece, out=vector)
            first = vector

    # --- large vectors ----------------------------------------------------------------

    def allreduce(self, vector: Array, ufunc: np.ufunc, source: Array) -> None:
        """All-reduce ``source`` into ``vector``; they may be the same memory.

        Both are contiguous, with shape (n,) and one dtype, equal on all members. Every
        member owns a shard.
        """
        plan = self._plan(vector, even_bounds(len(vector), self.members))
        slots = _Slots(self._segment, vector.dtype)
        base, first = self.progress.step, self._written
        self._written += plan.rounds
        if plan.rounds:
            self._write_pieces(plan, slots, source, 0, first)
        for number in range(plan.rounds + 1):
            if number + 1 < plan.rounds:
                self._write_pieces(plan, slots, source, number + 1, first)
            elif number < plan.rounds:
                self.progress.done()
            if number < plan.rounds:
                self._wait(base + max(1, 2 * number))
                start, end = plan.piece(number, self.me)
                own = vector[start:end]
                self._combine(plan, slots, source, vector, number, first, ufunc)
                slots.results[self.me][number % SLOTS][: len(own)] = own
                self.progress.done()
            if number > 0:
                self._wait(base + 2 * number + 1)
                self._read_results(plan, slots, vector, number - 1, number - 1)

    def reduce_scatter(
        self, vector: Array, ufunc: np.ufunc, source: Array, bounds: Sequence[int]
    ) -> _Bounds:
        """Reduce this member's shard into ``vector``; return its start and end.

        Member m owns the shard from ``bounds[m]`` to ``bounds[m + 1]``. Members beyond
        the last of these own none, and return (0, 0).
        """
        plan = self._plan(vector, bounds)
        slots = _Slots(self._segment, vector.dtype)
        base, first = self.progress.step, self._written
        self._written += plan.rounds
        for number in range(plan.rounds):
            self._write_pieces(plan, slots, source, number, first)
            self._wait(base + 2 * number + 1)
            self._combine(plan, slots, source, vector, number, first, ufunc)
            self.progress.done()
        return plan.shard(self.me)

    def allgather_shards(self, vector: Array, bounds: Sequence[int]) -> None:
        """Copy every owner's shard into ``vector``; see ``reduce_scatter``."""
        plan = self._plan(vector, bounds)
        slots = _Slots(self._segment, vector.dtype)
        # Others may still read the results of the last operation.
        self.progress.done()
        self._wait(self.progress.step)
        for number in range(plan.rounds):
            start, end = plan.piece(number, self.me)
            slots.results[self.me][number % SLOTS][: end - start] = vector[start:end]
            self.progress.done()
            self._wait(self.progress.step)
            self._read_results(plan, slots, vector, number, number)

    def _write_pieces(
        self, plan: _Plan, slots: _Slots, source: Array, number: int, first: int
    ) -> None:
        """Write our pieces of the other members' shards to shared memory."""
        target = slots.pieces[self.me][(first + number) % SLOTS]
        for owner in self._others:
            start, end = plan.piece(number, owner)
            offset = owner * plan.length
            target[offset : offset + end - start] = source[start:end]
        self.progress.done()

    def _combine(
        self,
        plan: _Plan,
        slots: _Slots,
        source: Array,
        vector: Array,
        number: int,
        first: int,
        ufunc: np.ufunc,
    ) -> None:
        """Reduce all members' pieces of our shard into the vector.

        In the order of members, so that the bits of an element do not depend on who
        owns it.
        """
        start, end = plan.piece(number, self.me)
        offset, slot = self.me * plan.length, (first + number) % SLOTS
        first_piece, second_piece, *others = [
            source[start:end]
            if member == self.me
            else slots.pieces[member][slot][offset : offset + end - start]
            for member in range(self.members)
        ]
        own = vector[start:end]
        # The vector may be the source, which must last until it is added.
        total = own if self.me < 2 else np.empty_like(own)
        ufunc(first_piece, second_piece, out=total)
        for piece in others:
            ufunc(total, piece, out=total)
        if total is not own:
            own[:] = total

    def _read_results(
        self, plan: _Plan, slots: _Slots, vector: Array, number: int, round_: int
    ) -> None:
        for owner in self._others:
            start, end = plan.piece(number, owner)
            vector[start:end] = slots.results[owner][round_ % SLOTS][: end - start]

    def _plan(self, vector: Array, bounds: Sequence[int]) -> _Plan:
        return _Plan(bounds, self._segment.piece_bytes // vector.itemsize)

    def _wait(self, step: int) -> None:
        self.progress.wait(step, self._timeout_s)


def even_bounds(count: int, owners: int) -> list[int]:
    """The ``owners + 1`` bounds of even shards of ``count`` elements."""
    return [count * owner // owners for owner in range(owners + 1)]


class _Plan:
    """The shards of a vector, and their pieces in each round."""

    def __init__(self, bounds: Sequence[int], per_piece: int) -> None:
        self._owners = len(bounds) - 1
        self._bounds = bounds
        longest = max(end - start for start, end in pairwise(bounds))
        self.rounds = -(-longest // per_piece)
        # Pieces are even: a tiny last piece would cost as much as a whole round.
        self.length = -(-longest // self.rounds) if self.rounds else 0

    def shard(self, owner: int) -> _Bounds:
        if owner >= self._owners:
            return 0, 0
        return self._bounds[owner], self._bounds[owner + 1]

    def piece(self, number: int, owner: int) -> _Bounds:
        start, end = self.shard(owner)
        return (
            min(end, start + number * self.length),
            min(end, start + (number + 1) * self.length),
        )


class _Slots:
    """The segment's slots as arrays of the vector's dtype."""

    def __init__(self, segment: ShmSegment, dtype: np.dtype[np.generic]) -> None:
        def typed(
            rows: list[list[np.ndarray[tuple[int], np.dtype[np.uint8]]]],
        ) -> list[list[Array]]:
            return [[slot.view(dtype) for slot in row] for row in rows]

        self.pieces = typed(segment.pieces)
        self.results = typed(segment.results)
