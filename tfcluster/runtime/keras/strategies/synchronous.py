"""The hooks for ranks that are in step: each takes its rows of every batch."""

from __future__ import annotations

from tfcluster.runtime.contract import Around
from tfcluster.runtime.keras.checks.batch_numbers import BatchNumbers
from tfcluster.runtime.keras.checks.loss_reduction import WholeBatch
from tfcluster.runtime.keras.checks.op_replay import Holds
from tfcluster.runtime.keras.checks.row_terms import RowTerms
from tfcluster.runtime.keras.checks.shape_errors import ShapeErrors
from tfcluster.runtime.keras.checks.unsupported_strategies import refuse_strategies
from tfcluster.runtime.keras.data.dataset_iteration import Loops
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.train.assign_hook import Variables
from tfcluster.runtime.keras.train.chief_only_saving import Files
from tfcluster.runtime.keras.train.gradient_update import Update
from tfcluster.runtime.keras.train.initial_broadcast import Synchroniser
from tfcluster.runtime.keras.train.injected_callbacks import Callbacks
from tfcluster.runtime.keras.train.loss_rescaling import Losses
from tfcluster.runtime.keras.train.metric_state import MetricState
from tfcluster.runtime.keras.train.metrics import Metrics
from tfcluster.runtime.keras.train.model_methods import Entry
from tfcluster.runtime.keras.train.moving_statistics import LayerState
from tfcluster.runtime.keras.train.optimizer_hook import Optimizers
from tfcluster.runtime.keras.train.per_rank_seeds import Randomness
from tfcluster.runtime.keras.train.sync_batch_norm import Normalization
from tfcluster.runtime.keras.train.tape_gradients import TapeGradients
from tfcluster.runtime.keras.train.xla_fallback import Compilation


def install(
    session: Session,
    update: Update,
    *,
    loss_scaled: Around | None = None,
    tape_gradients: TapeGradients | None = None,
) -> None:
    """Hook into the imported Keras, once for each process.

    ``loss_scaled`` stands around ``LossScaleOptimizer.apply``.
    """
    synchroniser = Synchroniser(session)
    layer_state = LayerState(session)
    holds = Holds()
    row_terms = RowTerms(session, holds)
    shape_errors = ShapeErrors(session)
    loops = Loops(session, row_terms)
    whole_batch = WholeBatch(session)
    metric_state = MetricState(session, loops)
    metrics = Metrics(session, metric_state, layer_state, BatchNumbers(row_terms))
    files = Files(session)
    callbacks = Callbacks(session, synchroniser, metrics, files)
    Variables(session, layer_state, metric_state, loops).install()
    layer_state.install()
    session.settle = update.settle
    optimizers = Optimizers(session, synchroniser, layer_state, update)
    optimizers.install(loss_scaled)
    if tape_gradients is not None:
        tape_gradients.install(optimizers.state_of)
    Compilation(session, shape_errors).install()
    Normalization(session, holds).install()
    Randomness(session, loops).install()
    refuse_strategies()
    metrics.install()
    loops.install()
    whole_batch.install()
    Losses(session, whole_batch, holds).install()
    files.install()
    if session.divides and session.size > 1:
        row_terms.install()
    shape_errors.install()
    entry = Entry(session, synchroniser, metrics, callbacks, row_terms, shape_errors)
    entry.install()
