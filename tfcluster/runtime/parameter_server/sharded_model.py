"""One model's variable shards on one ps, and their version.

All methods are called with the lock of the ps held, so that other threads see an update
as a whole or not at all. Returned arrays do not change when later updates are applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tfcluster.runtime.collective.sparse import Slices, are_distinct
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.parameter_server.placement import Piece
from tfcluster.runtime.parameter_server.sharding import Gradient
from tfcluster.runtime.telemetry.tracer import UPDATES, tracer

_MANY_ROWS = 0.5
"""If more than this fraction of the rows has changed, the whole array is sent."""


class Engine(Protocol):
    """Holds variables and applies updates to them: see ``update_graph.Engine``."""

    @property
    def held_bytes(self) -> int: ...

    def knows(self, kinds: str) -> bool: ...

    def define(self, data: bytes) -> None: ...

    def apply(self, gradients: Sequence[Gradient], kinds: str) -> None: ...

    def read(self, index: int) -> Array: ...

    def rows(self, index: int, indices: Array) -> Array: ...

    def assign(self, index: int, value: Array) -> None: ...

    def slots(self) -> dict[str, Array]: ...

    def assign_slot(self, path: str, value: Array) -> None: ...

    def release(self) -> None: ...


@dataclass(slots=True)
class Counts:
    """Statistics of the gradients that arrived; staleness is counted in versions."""

    applied: int = 0
    dropped: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0

    def apply(self, staleness: int) -> None:
        """Count a gradient that was computed ``staleness`` versions ago."""
        self.applied += 1
        self.staleness_sum += staleness
        self.staleness_max = max(self.staleness_max, staleness)


class ShardedModel:
    """The shards of one model on this ps; ``pieces`` keeps their order."""

    def __init__(
        self, pieces: Sequence[Piece], rows_only: Sequence[bool], engine: Engine
    ) -> None:
        self.pieces = tuple(pieces)
        self.engine = engine
        self.version = 0
        """The number of updates that have been applied."""
        self.counts = Counts()
        self._tracer = tracer()
        self._changed = [
            np.zeros(piece.end - piece.start, np.int64) if only else None
            for piece, only in zip(pieces, rows_only, strict=True)
        ]
        """For each ``rows_only`` shard, the version in which each row last changed."""
        self._latest: dict[int, Array] = {}
        """For each shard whose last gradient was sparse, the rows that it changed."""

    def apply(
        self, gradients: Sequence[Gradient], kinds: str, *, staleness: int = 0
    ) -> None:
        """Apply one step. The gradients were computed ``staleness`` versions ago.

        There is one gradient per shard, of the shard's shape. Raises KeyError if the
        engine does not know the update for ``kinds``.
        """
        gradients = [
            _with_own_indices(g) if isinstance(g, Slices) else g for g in gradients
        ]
        tracer = self._tracer
        if tracer is None:
            self.engine.apply(gradients, kinds)
        else:
            began_s = tracer.clock()
            self.engine.apply(gradients, kinds)
            tracer.add(UPDATES, "update", began_s, tracer.clock())
        self.version += 1
        self.counts.apply(staleness)
        self._latest = {}
        for index, (gradient, changed) in enumerate(
            zip(gradients, self._changed, strict=True)
        ):
            if changed is None or gradient is None:
                continue
            if isinstance(gradient, Slices):
                changed[gradient.indices] = self.version
                if are_distinct(gradient.indices):
                    self._latest[index] = gradient.indices
            else:
                changed[:] = self.version

    def changes_since(self, since: int) -> tuple[str, list[Array]]:
        """The changes since a version: a letter for each shard, and arrays.

        ``d``: the whole value; ``s``: the changed rows, then their indices; ``-``: no
        change and no array.
        """
        kinds, arrays = "", []
        for index, changed in enumerate(self._changed):
            if changed is None:
                kinds += "d"
                arrays.append(self.engine.read(index))
                continue
            if since == self.version - 1 and index in self._latest:
                rows = self._latest[index]
            else:
                rows = np.flatnonzero(changed > since)
            if len(rows) > _MANY_ROWS * len(changed):
                kinds += "d"
                arrays.append(self.engine.read(index))
            elif len(rows):
                kinds += "s"
                arrays += [self.engine.rows(index, rows), rows]
            else:
                kinds += "-"
        return kinds, arrays

    def values(self) -> list[Array]:
        """The current values of all shards, in their order."""
        return [self.engine.read(index) for index in range(len(self.pieces))]

    def assign(self, index: int, value: Array) -> None:
        """Set a shard; all tasks receive the new value with the next update."""
        self.engine.assign(index, value)
        self._latest.pop(index, None)
        changed = self._changed[index]
        if changed is not None:
            changed[:] = self.version + 1


def _with_own_indices(slices: Slices) -> Slices:
    """The slices with a copy of the indices, which are kept after this update."""
    return Slices(slices.values, slices.indices.copy(), slices.rows)
