"""Asynchronous training: ranks do not wait for each other and share only the ps tasks.

Each rank computes whole batches; the chief prints and saves. Ranks inform each other by
notes on the ps tasks.
"""

from __future__ import annotations

import atexit
from contextlib import suppress
from dataclasses import dataclass, field

from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.keras.data.round_robin_sharding import (
    FitBatches,
    LoopBatches,
    ShardSpec,
)
from tfcluster.runtime.keras.strategies.async_coordination import Progress
from tfcluster.runtime.keras.strategies.async_models import AsyncModels
from tfcluster.runtime.keras.strategies.async_saving import AsyncSaving
from tfcluster.runtime.keras.strategies.ps_models import ServerModels
from tfcluster.runtime.keras.strategies.served_updates import ServedUpdates
from tfcluster.runtime.keras.train.xla_fallback import XlaFallback
from tfcluster.runtime.keras.training_session import Session

_SUSPICIOUS = 3
"""Warn after this many undivided batches in a row: a loop's first batch is never
divided."""

_UNDIVIDED = (
    "every rank pushes the gradients of all batches: batches are not distributed, "
    "and each counts once per rank. Batches are distributed in model.fit and in "
    "loops over a batched tf.data.Dataset"
)


def install(
    session: AsyncSession, server_models: ServerModels, progress: Progress
) -> None:
    """Install the hooks in Keras, once per process."""
    loops = LoopBatches(session, session.shard)
    undivided = 0

    def pushed(optimizer: str) -> None:
        nonlocal undivided
        session.applies += 1
        session.step_rate.applied(optimizer)
        if session.inside_keras or not session.divides:
            return
        undivided = 0 if loops.divides_now else undivided + 1
        if undivided == _SUSPICIOUS:
            session.warn(_UNDIVIDED)

    updates = ServedUpdates(session, server_models, pushed)
    session.settle = server_models.settle
    updates.install()

    def settle_loops() -> None:
        """After a loop of the program, fetch weights that include all batches."""
        if loops.take_ended():
            progress.await_loops()
            server_models.pull()

    files = AsyncSaving(session, progress, settle_loops)
    atexit.register(_end_program, progress)
    XlaFallback(session).install()

    def set_idle(idle: bool) -> None:
        updates.idle = idle

    batches = FitBatches(session, session.shard, set_idle)
    batches.install()
    loops.install()
    files.install()
    AsyncModels(
        session,
        files,
        session.shard,
        server_models,
        progress,
        updates,
        batches,
        loops,
        settle_loops,
    ).install()


def _end_program(progress: Progress) -> None:
    # A ps may have been lost; then nobody waits for this rank.
    with suppress(CollectiveError):
        progress.program_ended()


@dataclass
class AsyncSession(Session):
    """The state of a rank in training. Its process group contains only itself."""

    shard: ShardSpec = field(kw_only=True)

    @property
    def chief(self) -> bool:
        return self.shard.rank == 0
