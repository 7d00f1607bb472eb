"""Asynchronous training: ranks do not wait for each other and share only the ps tasks.

Each rank computes whole batches; the chief prints and saves. Ranks inform each other by
notes on the ps tasks.
"""

from __future__ import annotations

import atexit
from contextlib import suppress
from dataclasses import dataclass, field

from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.keras.checks.own_exchanges import OwnExchanges
from tfcluster.runtime.keras.checks.shape_errors import ShapeErrors
from tfcluster.runtime.keras.checks.unsupported_strategies import refuse_strategies
from tfcluster.runtime.keras.data.round_robin_sharding import (
    FitBatches,
    LoopBatches,
    ShardSpec,
)
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.state.moving_statistics import MovingStatistics
from tfcluster.runtime.keras.strategies.async_coordination import Progress
from tfcluster.runtime.keras.strategies.async_saving import AsyncSaving
from tfcluster.runtime.keras.strategies.async_training import AsyncTraining
from tfcluster.runtime.keras.strategies.parameter_server import PsUpdate
from tfcluster.runtime.keras.strategies.ps_models import ServerModels
from tfcluster.runtime.keras.train.initial_broadcast import InitialBroadcast
from tfcluster.runtime.keras.train.model_methods import ModelMethods
from tfcluster.runtime.keras.train.optimizer_hook import OptimizerHook
from tfcluster.runtime.keras.train.xla_fallback import XlaFallback


def install(
    session: AsyncSession, server_models: ServerModels, progress: Progress
) -> None:
    """Install the hooks in Keras, once per process."""
    update = PsUpdate(session, server_models)
    session.settle = update.settle
    server_models.install()
    loops = LoopBatches(session, session.shard)

    def settle_loops() -> None:
        """After a loop of the program, fetch weights that include all batches."""
        if loops.take_ended():
            progress.await_loops()
            server_models.pull()

    files = AsyncSaving(session, progress, settle_loops)
    atexit.register(_end_program, progress)
    own_exchanges = OwnExchanges(session, session.shard.rank, session.shard.size)
    own_exchanges.install()
    OptimizerHook(
        session,
        InitialBroadcast(session),
        MovingStatistics(session),
        update,
        own_exchanges,
    ).install(update.agreed_on_infinities)
    shape_errors = ShapeErrors(session)
    XlaFallback(session, shape_errors).install()
    refuse_strategies()
    batches = FitBatches(session, session.shard, update.set_idle)
    batches.install()
    loops.install()
    files.install()
    policy = AsyncTraining(
        session, session.shard, server_models, progress, batches, settle_loops, files
    )
    ModelMethods(session, policy, shape_errors).install()


def _end_program(progress: Progress) -> None:
    # A ps may have been lost; then nobody waits for this rank.
    with suppress(CollectiveError):
        progress.program_ended()


@dataclass
class AsyncSession(Session):
    """The state of a rank in training. Its process group contains only itself."""

    shard: ShardSpec = field(kw_only=True)

    undivided = (
        "every rank pushes the gradients of all batches: batches are not distributed, "
        "and each counts once per rank. Batches are distributed in model.fit and in "
        "loops over a batched tf.data.Dataset"
    )

    @property
    def chief(self) -> bool:
        return self.shard.rank == 0
