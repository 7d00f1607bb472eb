"""The callbacks that asynchronous ranks add to ``fit``."""

from __future__ import annotations

import keras

from tfcluster.runtime.collective import NotDistributedError
from tfcluster.runtime.keras import internals
from tfcluster.runtime.keras.strategies.ps_models import ServerModels
from tfcluster.runtime.keras.strategies.served_updates import ServedUpdates
from tfcluster.runtime.keras.training_session import Session
from tfcluster.runtime.keras.types import Logs
from tfcluster.runtime.parameter_server.progress import Progress


class Epochs(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Stops with the chief, and after a restart skips the epochs already done."""

    def __init__(
        self,
        session: Session,
        server_models: ServerModels,
        progress: Progress,
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


class FreshWeights(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Fetches the newest weights before a validation and for callbacks.

    At the end of ``fit`` these are the final weights, also for the program's callbacks:
    ``EarlyStopping`` may restore weights, and no rank may add a gradient to them.
    """

    def __init__(self, server_models: ServerModels, progress: Progress) -> None:
        super().__init__()
        self._server_models = server_models
        self._progress = progress

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self._server_models.pull()

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._progress.has_trained()
        self._progress.await_trained()
        self._server_models.pull()
