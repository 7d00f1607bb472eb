"""The hooks for synchronous ranks: each computes its rows of every batch."""

from __future__ import annotations

from collections.abc import Callable

from tfcluster.runtime.keras.checks.add_loss_check import AddLossCheck
from tfcluster.runtime.keras.checks.backward_functions import BackwardFunctions
from tfcluster.runtime.keras.checks.batch_numbers import BatchNumbers
from tfcluster.runtime.keras.checks.input_consistency import InputConsistency
from tfcluster.runtime.keras.checks.op_replay import Holds
from tfcluster.runtime.keras.checks.own_exchanges import OwnExchanges
from tfcluster.runtime.keras.checks.program_arrays import ProgramArrays
from tfcluster.runtime.keras.checks.program_variables import ProgramVariables
from tfcluster.runtime.keras.checks.row_terms import RowTerms
from tfcluster.runtime.keras.checks.shape_errors import ShapeErrors
from tfcluster.runtime.keras.checks.traced_draws import TracedDraws
from tfcluster.runtime.keras.checks.trial_steps import TrialSteps
from tfcluster.runtime.keras.checks.unsupported_strategies import refuse_strategies
from tfcluster.runtime.keras.data.dataset_iteration import DatasetIteration
from tfcluster.runtime.keras.inner_functions import InnerFunctions
from tfcluster.runtime.keras.losses.input_gradients import InputGradients
from tfcluster.runtime.keras.losses.loss_rescaling import LossRescaling
from tfcluster.runtime.keras.losses.whole_batch import WholeBatch
from tfcluster.runtime.keras.losses.whole_batch_losses import WholeBatchLosses
from tfcluster.runtime.keras.metrics.metrics import Metrics
from tfcluster.runtime.keras.random.drawn_rows import DrawnRows
from tfcluster.runtime.keras.random.row_draws import RowDraws
from tfcluster.runtime.keras.random.row_loops import RowLoops
from tfcluster.runtime.keras.random.stateful_draws import StatefulDraws
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.state.assign_hook import AssignHook
from tfcluster.runtime.keras.state.metric_state import MetricState
from tfcluster.runtime.keras.state.moving_statistics import MovingStatistics
from tfcluster.runtime.keras.state.rnn_states import RnnStates
from tfcluster.runtime.keras.strategies.synchronous_training import SynchronousTraining
from tfcluster.runtime.keras.train.chief_only_saving import ChiefOnlySaving
from tfcluster.runtime.keras.train.gradient_update import GradientUpdate
from tfcluster.runtime.keras.train.initial_broadcast import InitialBroadcast
from tfcluster.runtime.keras.train.injected_callbacks import InjectedCallbacks
from tfcluster.runtime.keras.train.model_methods import ModelMethods
from tfcluster.runtime.keras.train.optimizer_hook import OptimizerHook
from tfcluster.runtime.keras.train.sharded_steps import StepChecks
from tfcluster.runtime.keras.train.sync_batch_norm import SyncBatchNorm
from tfcluster.runtime.keras.train.tape_gradients import TapeGradients
from tfcluster.runtime.keras.train.xla_fallback import XlaFallback
from tfcluster.runtime.tensor_types import Gradient


def install(
    session: Session,
    update: GradientUpdate,
    *,
    before_loss_scale: Callable[[list[Gradient]], list[Gradient]] | None = None,
    tape_gradients: TapeGradients | None = None,
) -> None:
    """Install the hooks in Keras, once per process.

    For ``before_loss_scale`` see ``OptimizerHook.install``.
    """
    initial_broadcast = InitialBroadcast(session)
    layer_state = MovingStatistics(session)
    holds = Holds()
    row_terms = RowTerms(session, holds)
    shape_errors = ShapeErrors(session)
    arrays = ProgramArrays(session)
    iteration = DatasetIteration(session, row_terms, arrays)
    whole_batch = WholeBatch(session, holds)
    whole_batch.install()
    losses = WholeBatchLosses(session, whole_batch, holds)
    metric_state = MetricState(session, iteration, whole_batch)
    metrics = Metrics(session, metric_state, layer_state, BatchNumbers(row_terms))
    saving = ChiefOnlySaving(session)
    callbacks = InjectedCallbacks(session, initial_broadcast, metrics, saving)
    layer_state.install()
    session.settle = update.settle
    own_exchanges = OwnExchanges(session, session.rank, session.size)
    own_exchanges.install()
    AssignHook(session, layer_state, metric_state, iteration).install()
    optimizers = OptimizerHook(
        session, initial_broadcast, layer_state, update, own_exchanges
    )
    optimizers.install(before_loss_scale)
    if tape_gradients is not None:
        tape_gradients.install(optimizers.state_of)
    XlaFallback(session, shape_errors.in_function).install()
    SyncBatchNorm(session, holds, iteration).install()
    RnnStates(session, whole_batch).install()
    functions = InnerFunctions(session)
    functions.install()
    rows = DrawnRows(session, iteration, functions)
    RowDraws(session, rows).install()
    StatefulDraws(session, rows, functions).install()
    RowLoops(session, rows).install()
    refuse_strategies()
    metrics.install()
    iteration.install()
    losses.install()
    rescaling = LossRescaling(session, losses, holds)
    rescaling.install()
    if session.divides and session.size > 1:
        InputGradients(session, rescaling).install()
    saving.install()
    if session.divides and session.size > 1 and session.waits_in_steps:
        ProgramVariables(session).install()
        arrays.install()
    if session.divides and session.size > 1:
        row_terms.install()
        BackwardFunctions(session).install()
    shape_errors.install()
    trial_steps = TrialSteps(session)
    trial_steps.install()
    traced_draws = TracedDraws(session)
    traced_draws.install()
    checks = StepChecks(
        InputConsistency(session),
        AddLossCheck(session),
        trial_steps,
        row_terms,
        metrics,
        traced_draws,
        None if tape_gradients is None else tape_gradients.own_numbers,
    )
    policy = SynchronousTraining(session, initial_broadcast, metrics, callbacks, checks)
    ModelMethods(session, policy, shape_errors).install()
