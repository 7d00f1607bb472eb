"""The hooks for synchronous ranks: each computes its rows of every batch."""

from __future__ import annotations

from tfcluster.runtime.contract import Around
from tfcluster.runtime.keras.checks.batch_numbers import BatchNumbers
from tfcluster.runtime.keras.checks.loss_reduction import LossReductionCheck
from tfcluster.runtime.keras.checks.op_replay import Holds
from tfcluster.runtime.keras.checks.row_terms import RowTerms
from tfcluster.runtime.keras.checks.shape_errors import ShapeErrors
from tfcluster.runtime.keras.checks.unsupported_strategies import refuse_strategies
from tfcluster.runtime.keras.data.dataset_iteration import DatasetIteration
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.train.assign_hook import AssignHook
from tfcluster.runtime.keras.train.chief_only_saving import ChiefOnlySaving
from tfcluster.runtime.keras.train.gradient_update import GradientUpdate
from tfcluster.runtime.keras.train.initial_broadcast import InitialBroadcast
from tfcluster.runtime.keras.train.injected_callbacks import InjectedCallbacks
from tfcluster.runtime.keras.train.loss_rescaling import LossRescaling
from tfcluster.runtime.keras.train.metric_state import MetricState
from tfcluster.runtime.keras.train.metrics import Metrics
from tfcluster.runtime.keras.train.model_methods import ModelMethods
from tfcluster.runtime.keras.train.moving_statistics import MovingStatistics
from tfcluster.runtime.keras.train.optimizer_hook import OptimizerHook
from tfcluster.runtime.keras.train.per_rank_seeds import PerRankSeeds
from tfcluster.runtime.keras.train.sync_batch_norm import SyncBatchNorm
from tfcluster.runtime.keras.train.tape_gradients import TapeGradients
from tfcluster.runtime.keras.train.xla_fallback import XlaFallback


def install(
    session: Session,
    update: GradientUpdate,
    *,
    loss_scaled: Around | None = None,
    tape_gradients: TapeGradients | None = None,
) -> None:
    """Install the hooks in Keras, once per process.

    ``loss_scaled`` wraps ``LossScaleOptimizer.apply``.
    """
    synchroniser = InitialBroadcast(session)
    layer_state = MovingStatistics(session)
    holds = Holds()
    row_terms = RowTerms(session, holds)
    shape_errors = ShapeErrors(session)
    loops = DatasetIteration(session, row_terms)
    whole_batch = LossReductionCheck(session)
    metric_state = MetricState(session, loops)
    metrics = Metrics(session, metric_state, layer_state, BatchNumbers(row_terms))
    files = ChiefOnlySaving(session)
    callbacks = InjectedCallbacks(session, synchroniser, metrics, files)
    AssignHook(session, layer_state, metric_state, loops).install()
    layer_state.install()
    session.settle = update.settle
    optimizers = OptimizerHook(session, synchroniser, layer_state, update)
    optimizers.install(loss_scaled)
    if tape_gradients is not None:
        tape_gradients.install(optimizers.state_of)
    XlaFallback(session, shape_errors).install()
    SyncBatchNorm(session, holds).install()
    PerRankSeeds(session, loops).install()
    refuse_strategies()
    metrics.install()
    loops.install()
    whole_batch.install()
    LossRescaling(session, whole_batch, holds).install()
    files.install()
    if session.divides and session.size > 1:
        row_terms.install()
    shape_errors.install()
    entry = ModelMethods(
        session, synchroniser, metrics, callbacks, row_terms, shape_errors
    )
    entry.install()
