"""Our own Keras callbacks, and changes to the program's callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import keras
import numpy as np

from tfcluster.runtime.collective import (
    NotDistributedError,
    ReduceOp,
    Signature,
)
from tfcluster.runtime.collective.collectives import reduce_arrays
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.metrics.metrics import Metrics
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.train.chief_only_saving import ChiefOnlySaving
from tfcluster.runtime.keras.train.initial_broadcast import (
    InitialBroadcast,
    training_state,
)
from tfcluster.runtime.keras.types import (
    BackupAndRestore,
    Callback,
    CallbackList,
    Logs,
    Model,
)
from tfcluster.runtime.tensor_types import Nest

_CHIEF_ONLY = (keras.callbacks.TensorBoard, keras.callbacks.CSVLogger)
_DECIDES_NOTHING_IN_BATCHES = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.History,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.TensorBoard,
)
_LOOKS_AT_NO_WEIGHTS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.History,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.TerminateOnNaN,
)


_BATCH_METHODS = (
    "on_batch_begin",
    "on_batch_end",
    "on_train_batch_begin",
    "on_train_batch_end",
)


class Settling(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Settles the weights before later callbacks and the caller of ``fit`` see them."""

    def __init__(self, session: Session, *, every_epoch: bool) -> None:
        super().__init__()
        self._session = session
        self._every_epoch = every_epoch

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self._every_epoch:
            self._session.settle(f"end of epoch {epoch + 1}")

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._session.settle(f"end of fit of {self.model.name}")


class BatchLogs(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Gives later callbacks the logs merged over all ranks after every batch.

    Used only if one of them reads these logs, since it costs an exchange per batch.
    """

    def __init__(self, metrics: Metrics, *, trains: bool, tests: bool) -> None:
        super().__init__()
        self._metrics = metrics
        self._trains, self._tests = trains, tests

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if logs and self._trains:
            # CallbackList passes the same dictionary to all callbacks, in order.
            logs.update(self._metrics.of_step(self.model, logs))

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if logs and self._tests:
            logs.update(self._metrics.of_step(self.model, logs))


class Agreement(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Starts with equal variables, and stops training on all ranks at the same time."""

    def __init__(self, session: Session, synchroniser: InitialBroadcast) -> None:
        super().__init__()
        self._session = session
        self._synchroniser = synchroniser
        self._applies = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Agree on the first epoch, broadcast variables, and check the first step."""
        first = str(internals.initial_epoch(self.model) or 0)
        first = self._session.agreed(first, "first epoch")
        internals.set_initial_epoch(self.model, int(first) or None)
        if self.model.built:
            self._synchroniser.force(training_state(self.model))
        prove_first_step(self._session, self.model)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._applies = self._session.applies

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Raises NotDistributedError if the epoch has exchanged no gradient."""
        if self._session.applies == self._applies and self.model.trainable_variables:
            raise not_distributed(f"epoch {epoch + 1} of {self.model.name}")
        self.agree_on_stopping()

    def agree_on_stopping(self) -> None:
        """Stop on all ranks if any rank wants to stop."""
        stops = np.array([bool(self.model.stop_training)], np.int64)
        stops_anywhere = reduce_arrays(
            self._session.group, [stops], ReduceOp.MAX, Signature("whether to stop")
        )
        self.model.stop_training = bool(stops_anywhere[0][0])


class BatchAgreement(Agreement):
    """Also agrees after every batch, if a callback may stop there."""

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.agree_on_stopping()


class ByTheChief(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Wraps a callback with state in files: all ranks read, the chief writes."""

    def __init__(
        self, inner: BackupAndRestore, session: Session, files: ChiefOnlySaving
    ) -> None:
        super().__init__()
        self._inner = inner
        self._session = session
        self._files = files
        # Patch the instance, not the class, so that only this wrapper intercepts saves
        # in the middle of an epoch.
        self._saves = internals.save_of(inner)
        patches.TABLE.replace(
            patches.ONE_BACKUP_SAVE, inner, self._tfcluster_save_alone
        )

    def set_params(self, params: Mapping[str, object]) -> None:
        self._inner.set_params(params)

    def set_model(self, model: Model) -> None:
        self._inner.set_model(model)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._inner.on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._inner.on_train_batch_end(batch, logs)

    def _tfcluster_save_alone(self) -> None:
        """Save in the middle of an epoch: no rank waits for the chief."""
        if not self._session.within("saving"):
            self._session.settle("backup")
        if self._session.chief:
            with self._session.saving("backup"):
                self._saves()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._inner.on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._tfcluster_save(lambda: self._inner.on_epoch_end(epoch, logs))

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._tfcluster_save(lambda: self._inner.on_train_end(logs))

    def _tfcluster_save(self, act: Callable[[], None]) -> None:
        self._files.chief_only(act, f"end of {type(self._inner).__name__}")


class FileOfTheChief(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Follows a callback that writes a file, and makes all ranks wait for the file."""

    def __init__(self, path: object, files: ChiefOnlySaving) -> None:
        super().__init__()
        self._path = path
        self._files = files

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._files.wait_for(self._path, "end of CSVLogger")


class InjectedCallbacks:
    """Builds the list of callbacks for one call of ``fit``."""

    def __init__(
        self,
        session: Session,
        synchroniser: InitialBroadcast,
        metrics: Metrics,
        files: ChiefOnlySaving,
    ) -> None:
        self._session = session
        self._synchroniser = synchroniser
        self._metrics = metrics
        self._files = files

    def around(self, callbacks: Sequence[Callback]) -> list[Callback]:
        """The program's callbacks with ours before and after them."""
        ours = with_chief_only_files(callbacks, self._session, self._files)
        in_epochs = any(map(looks_at_batches, callbacks))
        tests = self._session.divides and any(map(_looks_at_test_batches, callbacks))
        if in_epochs or tests:
            logs = BatchLogs(self._metrics, trains=in_epochs, tests=tests)
            ours.insert(0, logs)
        if in_epochs:
            ours.append(BatchAgreement(self._session, self._synchroniser))
        else:
            ours.append(Agreement(self._session, self._synchroniser))
        looks = any(not isinstance(cb, _LOOKS_AT_NO_WEIGHTS) for cb in callbacks)
        ours.insert(0, Settling(self._session, every_epoch=looks))
        return ours


@contextmanager
def changed_callbacks(
    callbacks: Nest,
    model: Model,
    change: Callable[[Sequence[Callback]], list[Callback]],
) -> Iterator[CallbackList | list[Callback]]:
    """A context with the result of ``change`` for the program's callbacks.

    ``callbacks`` is the argument of ``fit``: None, a callback, a nested structure of
    callbacks, or a CallbackList, which is changed within the context only.
    """
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        yield change([cb for cb in keras.tree.flatten(callbacks) if cb is not None])
        return
    theirs = callbacks.callbacks
    callbacks.callbacks = change(theirs)
    for callback in callbacks.callbacks:
        if callback not in theirs:
            callback.set_model(model)
            callback.set_params(callbacks.params)  # None, if it was given none
    try:
        yield callbacks
    finally:
        callbacks.callbacks = theirs


def with_chief_only_files(
    callbacks: Iterable[Callback], session: Session, files: ChiefOnlySaving
) -> list[Callback]:
    """The callbacks of ``fit``; those that write files write only on the chief."""
    ours: list[Callback] = []
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            ours.append(ByTheChief(callback, session, files))
        elif session.chief or not isinstance(callback, _CHIEF_ONLY):
            ours.append(callback)
        if isinstance(callback, keras.callbacks.CSVLogger):
            ours.append(FileOfTheChief(callback.filename, files))
    return ours


def for_evaluation(
    callbacks: Nest, session: Session, metrics: Metrics | None = None
) -> CallbackList | list[Callback]:
    """The program's callbacks for ``evaluate`` and ``predict``.

    With ``metrics``, callbacks that read batch logs get logs merged over all ranks.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        unchanged: CallbackList = callbacks
        return unchanged
    theirs = [cb for cb in keras.tree.flatten(callbacks) if cb is not None]
    looks = metrics and session.divides and any(map(_looks_at_test_batches, theirs))
    ours = [cb for cb in theirs if session.chief or not isinstance(cb, _CHIEF_ONLY)]
    if metrics and looks:
        ours.insert(0, BatchLogs(metrics, trains=False, tests=True))
    return ours


def looks_at_batches(callback: Callback) -> bool:
    """Whether a callback may decide something in the middle of an epoch."""
    if isinstance(callback, _DECIDES_NOTHING_IN_BATCHES):
        return False
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return bool(callback.save_freq != "epoch")
    return any(_has_own(callback, name) for name in _BATCH_METHODS)


def _looks_at_test_batches(callback: Callback) -> bool:
    """Whether a callback may use the logs of a validation batch."""
    if isinstance(callback, _DECIDES_NOTHING_IN_BATCHES):
        return False
    return _has_own(callback, "on_test_batch_end")


def _has_own(callback: Callback, name: str) -> bool:
    method = getattr(getattr(callback, name), "__func__", None)
    return method is not getattr(keras.callbacks.Callback, name)


def prove_first_step(session: Session, model: Model) -> None:
    """Make the model's first step check that its gradient was exchanged.

    The step raises NotDistributedError if it was not.
    """
    patch, train_function = patches.ONE_MODEL_TRAIN_FUNCTION, model.train_function

    def first_step(iterator: Iterator[Nest]) -> Logs:
        patches.TABLE.replace(patch, model, train_function)
        applies = session.applies
        logs = train_function(iterator)
        if not has_exchanged(session, model, applies):
            raise not_distributed(f"the first step of {model.name}")
        return logs

    patches.TABLE.replace(patch, model, first_step)


def has_exchanged(session: Session, model: Model, applies: int) -> bool:
    """Whether gradients of ``model`` were exchanged since the count was ``applies``.

    Also true if gradients of the model's own variables pass through our hook, but not
    for gradients of models trained earlier. A model without trainable variables passes,
    since its optimizer may train variables that the model does not know.
    """
    variables = model.trainable_variables
    return not variables or session.applies > applies or session.hooks(variables)


def not_distributed(when: str) -> NotDistributedError:
    """The error for a program whose gradients were not exchanged.

    ``when`` says when no gradient was exchanged: "the first step of sequential".
    """
    return NotDistributedError(
        f"the script was not distributed: in {when} no gradient passed through "
        "Optimizer.apply of a Keras optimizer, where the ranks exchange them. Does a "
        "custom train_step change variables directly?"
    )
