"""Gathers the indices of a sparse gradient from all ranks.

Whether a rank takes its indices for common travels with them. A rank cannot know it of
the others: their graphs may have been traced for batches of other sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tfcluster.runtime.collective import ragged_collectives
from tfcluster.runtime.collective.sparse import Slices, are_common
from tfcluster.runtime.collective.transports.base import Array, Transport


@dataclass(frozen=True, slots=True)
class Gathered:
    """The indices of all ranks, the same on all of them."""

    parts: Sequence[Array]
    """The indices of each part, in rank order: integers of shape (n,); n may differ."""
    common: Array | None
    """The indices that all parts have whose slices are to be added up; None if slices
    are to be concatenated."""

    @property
    def joined(self) -> Array:
        """The indices of all parts, one part after the other."""
        return np.concatenate(self.parts)


def gathered_indices(transport: Transport, own: Sequence[Slices]) -> Gathered:
    """The indices of all ranks; ``own`` are this rank's parts, one or more.

    The parts' indices are of one dtype, equal on all ranks. Raises what
    ``Transport.allgather`` raises.
    """
    sent = [
        array
        for each in own
        for array in (
            np.array([len(each.indices), each.common], each.indices.dtype),
            each.indices,
        )
    ]
    received, _ = ragged_collectives.allgatherv(transport, np.concatenate(sent))
    parts, start, agreed = [], 0, True
    while start < len(received):
        count, common = received[start : start + 2].tolist()
        start += 2 + count
        parts.append(received[start - count : start])
        agreed = agreed and bool(common or not count)
    are_added = agreed and are_common(parts)
    return Gathered(parts, max(parts, key=len) if are_added else None)
