"""Keras callbacks of ours, and what becomes of the program's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from tfcluster.runtime.collective import (
    NotDistributedError,
    ReduceOp,
    Signature,
)
from tfcluster.runtime.collective.collectives import reduce_arrays
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.train.chief_only_saving import ChiefOnlySaving
from tfcluster.runtime.keras.train.initial_broadcast import (
    InitialBroadcast,
    training_state,
)
from tfcluster.runtime.keras.train.metrics import Metrics

Logs = dict[str, Any] | None

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
    """Has callbacks after it, and who calls ``fit``, see the weights of all ranks."""

    def __init__(self, session: Session, *, every_epoch: bool) -> None:
        super().__init__()
        self._session = session
        self._every_epoch = every_epoch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if self._every_epoch:
            self._session.settle(f"end of epoch {epoch + 1}")

    def on_train_end(self, logs: Logs = None) -> None:
        self._session.settle(f"end of fit of {self.model.name}")


class BatchLogs(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Gives the callbacks after it the logs of all ranks, batch by batch.

    Only where one of them looks: it costs an exchange for every batch.
    """

    def __init__(self, metrics: Metrics, *, trains: bool, tests: bool) -> None:
        super().__init__()
        self._metrics = metrics
        self._trains, self._tests = trains, tests

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if logs and self._trains:
            # CallbackList hands one dictionary to all callbacks, in order.
            logs.update(self._metrics.of_step(self.model, logs))

    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        if logs and self._tests:
            logs.update(self._metrics.of_step(self.model, logs))


class Agreement(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Begins with equal variables, and ends training on all ranks together."""

    def __init__(self, session: Session, synchroniser: InitialBroadcast) -> None:
        super().__init__()
        self._session = session
        self._synchroniser = synchroniser
        self._applies = 0

    def on_train_begin(self, logs: Logs = None) -> None:
        first = self._session.agreed(str(self.model._initial_epoch or 0), "first epoch")
        self.model._initial_epoch = int(first) or None
        if self.model.built:
            self._synchroniser.force(training_state(self.model))
        prove_first_step(self._session, self.model)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._applies = self._session.applies

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if self._session.applies == self._applies and self.model.trainable_variables:
            raise not_distributed(f"epoch {epoch + 1} of {self.model.name}")
        self.agree_on_stopping()

    def agree_on_stopping(self) -> None:
        """Stop where any rank wants to."""
        wish = np.array([bool(self.model.stop_training)], np.int64)
        wishes = reduce_arrays(
            self._session.group, [wish], ReduceOp.MAX, Signature("whether to stop")
        )
        self.model.stop_training = bool(wishes[0][0])


class BatchAgreement(Agreement):
    """The same after every batch, where a callback may stop there."""

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self.agree_on_stopping()


class ByTheChief(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """A callback that keeps state in files: all ranks read it, the chief writes it."""

    def __init__(self, inner: Any, session: Session, files: ChiefOnlySaving) -> None:
        super().__init__()
        self._inner = inner
        self._session = session
        self._files = files
        # Not setattr on the class: what it saves in the midst of an epoch is for this
        # one to see.
        self._saves = inner._save_model
        vars(inner)["_save_model"] = self._save_alone

    def set_params(self, params: Any) -> None:
        self._inner.set_params(params)

    def set_model(self, model: Any) -> None:
        self._inner.set_model(model)

    def on_train_begin(self, logs: Logs = None) -> None:
        self._inner.on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._inner.on_train_batch_end(batch, logs)

    def _save_alone(self) -> None:
        """In the midst of an epoch nobody waits for the chief."""
        if not self._session.within("saving"):
            self._session.settle("backup")
        if self._session.chief:
            with self._session.once("saving"):
                self._saves()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._inner.on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._save(lambda: self._inner.on_epoch_end(epoch, logs))

    def on_train_end(self, logs: Logs = None) -> None:
        self._save(lambda: self._inner.on_train_end(logs))

    def _save(self, act: Callable[[], None]) -> None:
        self._files.chief_only(act, f"end of {type(self._inner).__name__}")


class InjectedCallbacks:
    """Makes the list of callbacks for one call of ``fit``."""

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

    def around(self, callbacks: Any, model: Any) -> Any:
        """The program's callbacks, with ours before and after them."""
        if isinstance(callbacks, keras.callbacks.CallbackList):
            theirs = callbacks.callbacks
        else:
            theirs = [cb for cb in keras.tree.flatten(callbacks) if cb is not None]
        ours = served(theirs, self._session, self._files)
        looks_at_batches = any(map(_looks_at_batches, theirs))
        tests = self._session.divides and any(map(_looks_at_test_batches, theirs))
        if looks_at_batches or tests:
            logs = BatchLogs(self._metrics, trains=looks_at_batches, tests=tests)
            ours.insert(0, logs)
        if looks_at_batches:
            ours.append(BatchAgreement(self._session, self._synchroniser))
        else:
            ours.append(Agreement(self._session, self._synchroniser))
        looks = any(not isinstance(cb, _LOOKS_AT_NO_WEIGHTS) for cb in theirs)
        ours.insert(0, Settling(self._session, every_epoch=looks))
        if isinstance(callbacks, keras.callbacks.CallbackList):
            for callback in ours:
                callback.set_model(model)
                callback.set_params(callbacks.params)
            callbacks.callbacks = ours
            return callbacks
        return ours


def served(
    callbacks: Iterable[Any], session: Session, files: ChiefOnlySaving
) -> list[Any]:
    """Callbacks of ``fit``; those that write do so for the chief alone."""
    ours: list[Any] = []
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            ours.append(ByTheChief(callback, session, files))
        elif session.chief or not isinstance(callback, _CHIEF_ONLY):
            ours.append(callback)
    return ours


def for_evaluation(
    callbacks: Any, session: Session, metrics: Metrics | None = None
) -> Any:
    """The program's callbacks of ``evaluate`` and ``predict``.

    With ``metrics``, those that look at batches see the logs of all ranks.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    theirs = [cb for cb in keras.tree.flatten(callbacks) if cb is not None]
    looks = metrics and session.divides and any(map(_looks_at_test_batches, theirs))
    ours = [cb for cb in theirs if session.chief or not isinstance(cb, _CHIEF_ONLY)]
    if metrics and looks:
        ours.insert(0, BatchLogs(metrics, trains=False, tests=True))
    return ours


def _looks_at_batches(callback: Any) -> bool:
    """Whether a callback may decide something in the midst of an epoch."""
    if isinstance(callback, _DECIDES_NOTHING_IN_BATCHES):
        return False
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return bool(callback.save_freq != "epoch")
    return any(_has_own(callback, name) for name in _BATCH_METHODS)


def _looks_at_test_batches(callback: Any) -> bool:
    """Whether a callback may make anything of the logs of a batch in validation."""
    if isinstance(callback, _DECIDES_NOTHING_IN_BATCHES):
        return False
    return _has_own(callback, "on_test_batch_end")


def _has_own(callback: Any, name: str) -> bool:
    method = getattr(getattr(callback, name), "__func__", None)
    return method is not getattr(keras.callbacks.Callback, name)


def prove_first_step(session: Session, model: Any) -> None:
    """After the first step, see that its gradient went to the other ranks."""
    train_function = model.train_function

    def first_step(iterator: Any) -> Any:
        model.train_function = train_function
        applies = session.applies
        logs = train_function(iterator)
        if not has_exchanged(session, model, applies):
            raise not_distributed(f"the first step of {model.name}")
        return logs

    model.train_function = first_step


def has_exchanged(session: Session, model: Any, applies: int) -> bool:
    """Whether what ``model`` trains goes to the others; it had ``applies`` before.

    Its own variables count, not those of models that were trained before it. An
    optimizer that has none of them may still train what the model does not know of.
    """
    variables = model.trainable_variables
    return not variables or session.applies > applies or session.hooks(variables)


def not_distributed(when: str) -> NotDistributedError:
    return NotDistributedError(
        f"the script was not distributed: in {when} no gradient passed through "
        "Optimizer.apply of a Keras optimizer, where the ranks exchange them. Does a "
        "custom train_step change variables directly?"
    )
