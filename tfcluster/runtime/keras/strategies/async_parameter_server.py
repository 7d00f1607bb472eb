"""Asynchronous training: ranks do not wait for each other and share only the ps tasks.

Each rank computes whole batches; the chief prints and saves. What ranks must know of
each other is in notes on the ps tasks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras

from tfcluster.runtime import contract
from tfcluster.runtime.exchange.error_translation import translated
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.checks.endless_epochs import warn_of_endless_epochs
from tfcluster.runtime.keras.checks.shape_errors import ShapeErrors
from tfcluster.runtime.keras.checks.unsupported_strategies import (
    refuse_replicas,
    refuse_strategies,
)
from tfcluster.runtime.keras.data.round_robin_sharding import (
    FitBatches,
    LoopBatches,
    ShardSpec,
)
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.strategies.async_coordination import Progress
from tfcluster.runtime.keras.strategies.parameter_server import PsUpdate
from tfcluster.runtime.keras.strategies.ps_models import ServerModels
from tfcluster.runtime.keras.train.chief_only_saving import ChiefOnlySaving, Name
from tfcluster.runtime.keras.train.initial_broadcast import InitialBroadcast
from tfcluster.runtime.keras.train.injected_callbacks import (
    for_evaluation,
    has_exchanged,
    not_distributed,
    prove_first_step,
    served,
)
from tfcluster.runtime.keras.train.moving_statistics import MovingStatistics
from tfcluster.runtime.keras.train.optimizer_hook import OptimizerHook
from tfcluster.runtime.keras.train.xla_fallback import XlaFallback, without_xla
from tfcluster.runtime.keras.types import Model

Logs = dict[str, Any] | None


def install(session: AsyncSession, masters: ServerModels, progress: Progress) -> None:
    """Install the hooks in Keras, once per process."""
    update = PsUpdate(session, masters)
    session.settle = update.settle
    masters.install()
    files = AsyncSaving(session, progress)
    OptimizerHook(
        session, InitialBroadcast(session), MovingStatistics(session), update
    ).install(update.loss_scaled)
    XlaFallback(session, ShapeErrors(session)).install()
    refuse_strategies()
    batches = FitBatches(session, session.hand, update.set_idle)
    batches.install()
    LoopBatches(session, session.hand).install()
    files.install()
    AsyncModelMethods(session, masters, progress, batches, files).install()


@dataclass
class AsyncSession(Session):
    """The state of a rank in training. Its process group contains only itself."""

    hand: ShardSpec = field(kw_only=True)

    undivided = (
        "every rank pushes the gradients of all batches: batches are not distributed, "
        "and each counts once per rank. Batches are distributed in model.fit and in "
        "loops over a batched tf.data.Dataset"
    )

    @property
    def chief(self) -> bool:
        return self.hand.rank == 0


class Epochs(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Stops with the chief, and after a restart skips the epochs already done."""

    def __init__(
        self, session: Session, masters: ServerModels, progress: Progress
    ) -> None:
        super().__init__()
        self._session = session
        self._masters = masters
        self._progress = progress
        self._applies = 0

    def on_train_begin(self, logs: Logs = None) -> None:
        self._progress.begin_fit()
        if self._progress.restarted:
            self._resume()
        prove_first_step(self._session, self.model)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._applies = self._session.applies

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if not self._session.chief and self._progress.chief_has_stopped(at_once=False):
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if not has_exchanged(self._session, self.model, self._applies):
            raise not_distributed(f"epoch {epoch + 1} of {self.model.name}")
        # Pass on what callbacks have assigned now: other ranks should not wait for it.
        self._masters.tell_all()
        self._progress.epoch_done(epoch + 1)
        if self._session.chief:
            if self.model.stop_training:
                self._progress.stop()
        else:
            # This rank's metrics are only those of its own batches, so the chief
            # decides.
            stopped = self._progress.chief_has_stopped(at_once=True)
            self.model.stop_training = stopped

    def on_train_end(self, logs: Logs = None) -> None:
        self._masters.tell_all()
        self._progress.end_fit()
        self._masters.pull()

    def _resume(self) -> None:
        model = self.model
        done = self._progress.epochs_done()
        if done > (internals.initial_epoch(model) or 0):
            internals.set_initial_epoch(model, done)
        optimizer = getattr(model, "optimizer", None)
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if done and model.built and isinstance(inner, keras.optimizers.Optimizer):
            if not inner.built:
                model.optimizer.build(model.trainable_variables)
            # Perhaps only an evaluation is left, and then no gradient would open the
            # model.
            self._masters.of(inner, "-" * len(internals.trained_variables(inner)))


class FreshWeights(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Fetches the newest weights before a validation and for callbacks."""

    def __init__(self, masters: ServerModels) -> None:
        super().__init__()
        self._masters = masters

    def on_test_begin(self, logs: Logs = None) -> None:
        self._masters.pull()


class AsyncModelMethods:
    """The hooks on ``fit``, ``evaluate`` and the model's other entry points."""

    def __init__(
        self,
        session: AsyncSession,
        masters: ServerModels,
        progress: Progress,
        batches: FitBatches,
        files: ChiefOnlySaving,
    ) -> None:
        self._session = session
        self._masters = masters
        self._progress = progress
        self._batches = batches
        self._files = files
        self._calls = 0

    def install(self) -> None:
        patches.TABLE.install(
            {
                patches.MODEL_FIT: self._fit,
                patches.MODEL_EVALUATE: self._evaluate,
                patches.MODEL_PREDICT: self._inside,
                patches.MODEL_TRAIN_ON_BATCH: self._train_on_batch,
                patches.MODEL_TEST_ON_BATCH: self._inside,
                patches.MODEL_PREDICT_ON_BATCH: self._inside,
            }
        )

    def _fit(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        call = inspect.signature(original).bind(model, *args, **kwargs)
        call.arguments["callbacks"] = self._around(
            call.arguments.get("callbacks"), model
        )
        if not self._session.chief:
            call.arguments["verbose"] = 0
        warn_of_endless_epochs(self._session, call.arguments)
        with self._entering(model), self._batches.next_is_dealt():
            return original(*call.args, **call.kwargs)

    def _around(self, callbacks: Any, model: Model) -> Any:
        ours = [FreshWeights(self._masters)]
        last = Epochs(self._session, self._masters, self._progress)
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            theirs = [cb for cb in keras.tree.flatten(callbacks) if cb is not None]
            return [*ours, *served(theirs, self._session, self._files), last]
        theirs = served(callbacks.callbacks, self._session, self._files)
        callbacks.callbacks = [*ours, *theirs, last]
        for callback in callbacks.callbacks:
            callback.set_model(model)
            callback.set_params(callbacks.params)
        return callbacks

    def _evaluate(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        call = inspect.signature(original).bind(model, *args, **kwargs)
        if not self._session.inside_keras:
            callbacks = call.arguments.get("callbacks")
            call.arguments["callbacks"] = for_evaluation(callbacks, self._session)
            if not self._session.chief:
                call.arguments["verbose"] = 0
            self._masters.pull()
        with self._entering(model):
            return original(*call.args, **call.kwargs)

    def _inside(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        with self._entering(model):
            return original(model, *args, **kwargs)

    def _train_on_batch(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        """Run every N-th call on this rank; other calls return its last result."""
        number, self._calls = self._calls, self._calls + 1
        last = vars(model).get("_tfcluster_last_logs")
        divides = self._session.divides and not self._session.loop.divided
        if last is not None and divides and not self._session.hand.takes(number):
            return last
        with self._entering(model):
            logs = original(model, *args, **kwargs)
        contract.mark(model, "_tfcluster_last_logs", logs)
        return logs

    @contextmanager
    def _entering(self, model: Model) -> Iterator[None]:
        refuse_replicas(model.distribute_strategy)
        without_xla(model)
        with translated(), self._session.entering():
            yield


class AsyncSaving(ChiefOnlySaving):
    """Only the chief saves. Outside of ``fit`` the other ranks wait until it has."""

    def __init__(self, session: Session, progress: Progress) -> None:
        super().__init__(session)
        self._progress = progress

    def chief_only(
        self, act: Callable[[], Any], what: str, name: Name | None = None
    ) -> Any:
        """Call ``act`` on the chief. ``name`` is ignored: the ranks do not compare it,
        since they do not wait for each other here."""
        session = self._session
        if session.within("saving"):
            return act()
        session.settle(what)
        if session.inside_keras:
            if not session.chief:
                return None
            with session.once("saving"):
                return act()
        if not session.chief:
            return self._progress.wait_for_writing()
        try:
            with session.once("saving"):
                result = act()
        except Exception as error:
            self._progress.written("", error=f"the chief could not save: {error}")
            raise
        self._progress.written(result if isinstance(result, str) else "")
        return result
