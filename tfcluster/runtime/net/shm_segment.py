"""Memory that the ranks of one host share.

An anonymous file (memfd) of the first of them, which the others open by way of /proc:
it has no name, is as large as it has to be, and goes with the last process that has it.
Knows who writes where, not when.
"""

from __future__ import annotations

import mmap
import os
import secrets

import numpy as np
from numpy.typing import NDArray

SLOTS = 3
"""How many pieces may be under way at a time: see ``local``."""
_PIECE_BYTES = 1 << 19
_ROUND_BYTES = 1 << 21
"""What all pieces of a round should not exceed: they are to stay in a core's cache."""
_LINE_BYTES = 64
"""Of a cache. What one rank writes and another one watches has one for itself."""
_NONCE_BYTES = 32

Bytes = NDArray[np.uint8]


class Arena:
    """``members`` ranks' parts of the memory; each writes only into its own.

    - ``steps``, ``asleep``: one number of each rank (unsigned, 64 bits)
    - ``lengths[m][slot]``: how much of something rank m has, in bytes
    - ``pieces[m][slot]``: what rank m has for others, ``members * piece_bytes``
    - ``results[m][slot]``: what rank m has combined, ``piece_bytes``
    """

    def __init__(self, descriptor: int, members: int) -> None:
        self.members = members
        self.piece_bytes = piece_bytes(members)
        self._memory = mmap.mmap(descriptor, _size(members))
        whole = np.frombuffer(self._memory, np.uint8)
        self._nonce = whole[:_NONCE_BYTES]
        numbers = whole[_LINE_BYTES : _LINE_BYTES + _numbers_bytes(members)]
        lines = numbers.view(np.uint64).reshape(members, -1, _LINE_BYTES // 8)
        # Views of memory are read several times faster than arrays.
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
        """By which a rank knows that it has opened the right memory."""
        return self._nonce.tobytes()


def create(members: int) -> tuple[int, Arena]:
    """New memory, and its descriptor. Raises OSError where there is not enough."""
    descriptor = os.memfd_create("tfcluster-ranks")
    try:
        os.ftruncate(descriptor, _size(members))
        os.pwrite(descriptor, secrets.token_bytes(_NONCE_BYTES), 0)
        return descriptor, Arena(descriptor, members)
    except BaseException:
        os.close(descriptor)
        raise


def attach(pid: int, descriptor: int, nonce: bytes, members: int) -> Arena:
    """The memory that process ``pid`` has made.

    Raises OSError where it cannot be reached, or is another one.
    """
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(opened).st_size != _size(members):
            raise OSError("it has another size")
        arena = Arena(opened, members)
    finally:
        os.close(opened)
    if arena.nonce != nonce:
        raise OSError("it is not the memory of this run")
    return arena


def piece_bytes(members: int) -> int:
    """The largest part of one rank in one round; a multiple of every item's size."""
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
