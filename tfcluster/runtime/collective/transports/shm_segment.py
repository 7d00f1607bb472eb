"""The shared-memory segment of the ranks on one host.

It is a file that the first of these ranks creates and the others open: see ``memfd``.
This module knows who writes where, not when.
"""

from __future__ import annotations

import mmap

import numpy as np

from tfcluster.runtime.net import memfd

SLOTS = 3
"""Number of pieces that may be in use at a time: see ``shm_allreduce``."""
_PIECE_BYTES = 1 << 19
_ROUND_BYTES = 1 << 21
"""Upper limit for all pieces of a round, so that they stay in a core's cache."""
_LINE_BYTES = 64
"""The size of a cache line. Each word that ranks poll has its own line."""


class ShmSegment:
    """The segment of ``members`` ranks; each rank writes only to its own parts.

    - ``steps[m]``, ``asleep[m]``: one number of member m (uint64, a memoryview)
    - ``lengths[m][slot]``: total bytes that member m has to send in a small all-gather
      (uint64, shape (SLOTS,))
    - ``pieces[m][slot]``: data from member m for others (uint8, shape
      (members * piece_bytes,))
    - ``results[m][slot]``: what member m has reduced (uint8, shape (piece_bytes,))
    """

    def __init__(self, descriptor: int, members: int) -> None:
        self.members = members
        self.piece_bytes = piece_bytes(members)
        self._memory = mmap.mmap(descriptor, _size(members))
        whole = np.frombuffer(self._memory, np.uint8)
        self._nonce = whole[: memfd.NONCE_BYTES]
        numbers = whole[_LINE_BYTES : _LINE_BYTES + _numbers_bytes(members)]
        lines = numbers.view(np.uint64).reshape(members, -1, _LINE_BYTES // 8)
        # Reading a memoryview is several times faster than reading an array item.
        self.steps = [lines[m, 0, :1].data for m in range(members)]
        self.asleep = [lines[m, 1, :1].data for m in range(members)]
        self.lengths = [lines[m, 2 : 2 + SLOTS, 0] for m in range(members)]
        start = _data_offset(members)
        data = whole[start:].reshape(members, SLOTS, -1)
        end = members * self.piece_bytes
        self.pieces = [[data[m, s, :end] for s in range(SLOTS)] for m in range(members)]
        self.results = [
            [data[m, s, end:] for s in range(SLOTS)] for m in range(members)
        ]

    @property
    def nonce(self) -> bytes:
        """Random bytes by which a rank verifies that it opened the right segment."""
        return self._nonce.tobytes()


def create(members: int) -> tuple[int, ShmSegment]:
    """Create a segment; return its descriptor, too. Raises OSError if that fails."""
    with memfd.created("tfcluster-ranks", _size(members)) as descriptor:
        return descriptor, ShmSegment(descriptor, members)


def attach(pid: int, descriptor: int, nonce: bytes, members: int) -> ShmSegment:
    """Open the segment that process ``pid`` has created.

    Raises OSError if it cannot be opened, or has the wrong size or nonce.
    """
    with memfd.opened(pid, descriptor, _size(members), nonce) as found:
        return ShmSegment(found, members)


def piece_bytes(members: int) -> int:
    """The maximum size of a rank's piece in a round; a multiple of every item size."""
    fair = _ROUND_BYTES // members // mmap.PAGESIZE * mmap.PAGESIZE
    return max(mmap.PAGESIZE, min(_PIECE_BYTES, fair))


def _numbers_bytes(members: int) -> int:
    return members * (2 + SLOTS) * _LINE_BYTES


def _data_offset(members: int) -> int:
    used = _LINE_BYTES + _numbers_bytes(members)
    return -(-used // mmap.PAGESIZE) * mmap.PAGESIZE


def _size(members: int) -> int:
    each = SLOTS * (members + 1) * piece_bytes(members)
    return _data_offset(members) + members * each
