"""Asynchronous training: ranks do not wait for each other and share only the ps tasks.

Each rank computes whole batches, and its metrics cover its own batches; the chief
prints and saves. Ranks inform each other by notes on the ps tasks.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import keras

from tfcluster.runtime import contract
from tfcluster.runtime.collective import CollectiveError, NotDistributedError
from tfcluster.runtime.exchange.error_translation import translated
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.data.round_robin_sharding import (
    FitBatches,
    LoopBatches,
    ShardSpec,
)
from tfcluster.runtime.keras.strategies.ps_models import ServerModels
from tfcluster.runtime.keras.strategies.served_updates import ServedUpdates
from tfcluster.runtime.keras.train.chief_only_saving import ChiefOnlySaving, RankPath
from tfcluster.runtime.keras.train.partitioned_models import PartitionedModels
from tfcluster.runtime.keras.train.xla_fallback import XlaFallback
from tfcluster.runtime.keras.training_session import TrainingSession
from tfcluster.runtime.keras.types import Callback, Layer, Logs, Model
from tfcluster.runtime.parameter_server.progress import StepNotes
from tfcluster.runtime.tensor_types import Array

T = TypeVar("T")

_LAST_LOGS = "_tfcluster_last_logs"
_SUSPICIOUS = 3
"""Warn after this many undivided batches in a row: a loop's first batch is never
divided."""

_UNDIVIDED = (
    "every rank pushes the gradients of all batches: batches are not distributed, "
    "and each counts once per rank. Batches are distributed in model.fit and in "
    "loops over a batched tf.data.Dataset"
)


class AsyncRank(PartitionedModels):
    """The hooks of a rank; on the methods of a model, and what these share."""

    def __init__(
        self,
        session: TrainingSession,
        shard: ShardSpec,
        server_models: ServerModels,
        progress: StepNotes,
    ) -> None:
        super().__init__(session, AsyncSaving(session, progress, self._settle_loops))
        self._shard = shard
        self._server_models = server_models
        self._progress = progress
        self._updates = ServedUpdates(session, server_models, self._pushed)
        self._batches = FitBatches(session, shard, self._set_idle)
        self._loops = LoopBatches(session, shard)
        self._undivided = 0
        self._calls = 0

    def install(self) -> None:
        """Install the hooks in Keras and TensorFlow, once per process."""
        super().install()
        self._session.settle = self._server_models.settle
        atexit.register(self._end_program)
        self._updates.install()
        self._batches.install()
        self._loops.install()
        self._files.install()
        XlaFallback(self._session).install()
        patches.TABLE.install(
            {
                patches.MODEL_TRAIN_ON_BATCH: self._train_on_batch,
                patches.LAYER_GET_WEIGHTS: self._get_weights,
            }
        )

    # --- updates ----------------------------------------------------------------------

    def _pushed(self, optimizer: str) -> None:
        session = self._session
        session.applies += 1
        session.step_rate.applied(optimizer)
        if session.inside_keras or not session.divides:
            return
        self._undivided = 0 if self._loops.divides_now else self._undivided + 1
        if self._undivided == _SUSPICIOUS:
            session.warn(_UNDIVIDED)

    def _set_idle(self, idle: bool) -> None:
        self._updates.idle = idle

    def _settle_loops(self) -> None:
        """After a loop of the program, fetch weights that include all batches."""
        if self._loops.take_ended():
            self._progress.await_loops()
            self._server_models.pull()

    def _end_program(self) -> None:
        # A ps may have been lost; then nobody waits for this rank.
        with suppress(CollectiveError):
            self._progress.program_ended()

    # --- methods of a model -----------------------------------------------------------

    def around(self, callbacks: Sequence[Callback]) -> list[Callback]:
        server_models, progress = self._server_models, self._progress
        return [
            self._fresh_weights(),
            *super().around(callbacks),
            Epochs(self._session, server_models, progress, self._updates),
        ]

    def _fresh_weights(self) -> Callback:
        """Fetches the newest weights before a validation and for callbacks.

        At the end of ``fit`` these are the final weights, also for the program's
        callbacks: ``EarlyStopping`` may restore weights, and no rank may add a gradient
        to them.
        """

        def pull_final(logs: Logs | None) -> None:
            self._progress.has_trained()
            self._progress.await_trained()
            self._server_models.pull()

        return keras.callbacks.LambdaCallback(
            on_test_begin=lambda logs: self._server_models.pull(),
            on_train_end=pull_final,
        )

    def fit(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        try:
            with self._batches.sharding_next_iterator():
                return super().fit(original, model, *args, **kwargs)
        except BaseException as error:
            # Otherwise the others would wait for this rank while its program continues.
            with suppress(CollectiveError):
                self._progress.abandon_fit()
                if self._session.chief and not isinstance(error, Exception):
                    # A signal has ended training, perhaps only here.
                    self._progress.stop()
            raise

    def evaluate(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        # Before a validation, a callback does this.
        if not self._session.inside_keras:
            self._server_models.pull()
        return super().evaluate(original, model, *args, **kwargs)

    def _train_on_batch(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        """Run every N-th call on this rank; other calls return its last result."""
        number, self._calls = self._calls, self._calls + 1
        last = vars(model).get(_LAST_LOGS)
        divides = self._session.divides and not self._loops.divides_now
        if last is not None and divides and not self._shard.takes(number):
            return last
        with translated(), self._session.entering():
            logs = original(model, *args, **kwargs)
        contract.mark(model, _LAST_LOGS, logs)
        return logs

    def _get_weights(
        self, original: Callable[[Layer], list[Array]], layer: Layer
    ) -> list[Array]:
        """After a loop of the program, fetch weights that include all ranks' batches.

        Otherwise there is nothing to do: this rank's last push returned the weights.
        """
        if not self._session.inside_keras:
            self._settle_loops()
        return original(layer)


class AsyncSaving(ChiefOnlySaving):
    """Lets only the chief save. Outside of ``fit``, the other ranks wait for it."""

    def __init__(
        self,
        session: TrainingSession,
        progress: StepNotes,
        settle_loops: Callable[[], None],
    ) -> None:
        super().__init__(session)
        self._progress = progress
        self._settle_loops = settle_loops

    def chief_only(
        self, act: Callable[[], T], what: str, name: RankPath | None = None
    ) -> T | str | None:
        """Call ``act`` on the chief; see ``ChiefOnlySaving``.

        ``name`` is ignored: the ranks do not compare it, since they do not wait for
        each other here. Within ``fit``, other ranks return None at once. Outside of
        ``fit``, they raise CollectiveError if ``act`` raised on the chief.
        """
        session = self._session
        if session.within("saving"):
            return act()
        if not session.inside_keras:
            self._settle_loops()
        session.settle(what)
        if session.inside_keras:
            if not session.chief:
                return None
            with session.saving(what):
                return act()
        if not session.chief:
            return self._progress.wait_for_writing()
        try:
            with session.saving(what):
                result = act()
        except Exception as error:
            self._progress.written("", error=f"the chief could not save: {error}")
            raise
        self._progress.written(result if isinstance(result, str) else "")
        return result


# --- callbacks ------------------------------------------------------------------------


class Epochs(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Stops with the chief, and after a restart skips the epochs already done."""

    def __init__(
        self,
        session: TrainingSession,
        server_models: ServerModels,
        progress: StepNotes,
        updates: ServedUpdates,
    ) -> None:
        super().__init__()
        self._session = session
        self._server_models = server_models
        self._progress = progress
        self._updates = updates
        self._applies: int | None = None
        """The number of gradients pushed before the first step; then None."""

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._progress.begin_fit()
        if self._progress.restarted:
            self._tfcluster_resume()
        self._applies = self._session.applies

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Raises NotDistributedError if the first step has pushed no gradient."""
        if self._applies is not None:
            self._tfcluster_prove(self._applies)
            self._applies = None
        if not self._session.chief and self._progress.chief_has_stopped(at_once=False):
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        # Pass on the callbacks' assignments now: other ranks should not wait for them.
        self._server_models.pass_on_all_assignments()
        self._progress.epoch_done(epoch + 1)
        if self._session.chief:
            if self.model.stop_training:
                self._progress.stop()
        else:
            # This rank's metrics cover only its own batches, so the chief decides.
            stopped = self._progress.chief_has_stopped(at_once=True)
            self.model.stop_training = stopped

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._server_models.pass_on_all_assignments()
        self._progress.end_fit()
        self._server_models.pull()

    def _tfcluster_prove(self, applies: int) -> None:
        """Raise NotDistributedError unless gradients pass through our hook."""
        # The optimizer may train variables that the model does not know.
        variables = self.model.trainable_variables
        if not variables or self._session.applies > applies:
            return
        if not self._updates.has_gradients_of(variables):
            raise NotDistributedError(
                "the script was not distributed: in the first step of "
                f"{self.model.name} no gradient passed through Optimizer.apply of a "
                "Keras optimizer, where the ranks push them. Does a custom train_step "
                "change variables directly?"
            )

    def _tfcluster_resume(self) -> None:
        model = self.model
        done = self._progress.epochs_done()
        if done > (internals.initial_epoch(model) or 0):
            internals.set_initial_epoch(model, done)
        optimizer = getattr(model, "optimizer", None)
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if done and model.built and isinstance(inner, keras.optimizers.Optimizer):
            if not inner.built:
                model.optimizer.build(model.trainable_variables)
            # Perhaps only an evaluation is left. Then no gradient would open the model.
            self._server_models.of(inner, "-" * len(internals.trained_variables(inner)))
