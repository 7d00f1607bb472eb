"""Changes to the program's callbacks: those that write files do so on the chief."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import keras

from tfcluster.protocol.task_events import EpochPosition
from tfcluster.runtime.files import private_files
from tfcluster.runtime.keras.train.chief_only_saving import ChiefOnlySaving
from tfcluster.runtime.keras.training_session import TrainingSession
from tfcluster.runtime.keras.types import Callback, CallbackList, Logs, Model
from tfcluster.runtime.telemetry.agent_channel import Reporter, numbers
from tfcluster.runtime.tensor_types import Nest

_DECIDES_NOTHING_IN_BATCHES = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.History,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.TensorBoard,
)
_BATCH_METHODS = (
    "on_batch_begin",
    "on_batch_end",
    "on_train_batch_begin",
    "on_train_batch_end",
)


def _listed(callbacks: Nest) -> list[Callback]:
    """The callbacks in an argument of ``fit``: see ``changed_callbacks``."""
    return [cb for cb in keras.tree.flatten(callbacks) if cb is not None]


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
        yield change(_listed(callbacks))
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
    callbacks: Iterable[Callback], session: TrainingSession, files: ChiefOnlySaving
) -> list[Callback]:
    """The callbacks of ``fit``; those that write files write only on the chief."""
    ours: list[Callback] = []
    shares = not private_files.are_private()
    for callback in callbacks:
        if shares and isinstance(callback, keras.callbacks.CSVLogger):
            ours += _written_once(callback, session, files)
        else:
            ours.append(callback)
    return ours


def _written_once(
    logger: keras.callbacks.CSVLogger, session: TrainingSession, files: ChiefOnlySaving
) -> list[Callback]:
    """A CSVLogger, whose file only the chief writes; all ranks wait for it.

    It opens its file when training begins, between the two callbacks around it.
    """
    path = logger.filename

    def divert(logs: Logs | None) -> None:
        logger.filename = path if session.chief else os.devnull

    def restore(logs: Logs | None) -> None:
        logger.filename = path

    def wait(logs: Logs | None) -> None:
        files.wait_for(path, "end of CSVLogger")

    before = keras.callbacks.LambdaCallback(on_train_begin=divert)
    after = keras.callbacks.LambdaCallback(on_train_begin=restore, on_train_end=wait)
    return [before, logger, after]


def looks_at_batches(callback: Callback) -> bool:
    """Whether a callback may decide something in the middle of an epoch."""
    if isinstance(callback, _DECIDES_NOTHING_IN_BATCHES):
        return False
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return bool(callback.save_freq != "epoch")
    return any(_has_own(callback, name) for name in _BATCH_METHODS)


def sees_predictions(callbacks: Nest) -> bool:
    """Whether one of the callbacks of ``predict`` gets the outputs of each batch."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    return any(
        _has_own(callback, "on_predict_batch_end")
        for callback in _listed(callbacks)
        if not isinstance(callback, keras.callbacks.ProgbarLogger)
    )


def _has_own(callback: Callback, name: str) -> bool:
    method = getattr(getattr(callback, name), "__func__", None)
    return method is not getattr(keras.callbacks.Callback, name)


class FitPosition(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """The last of the callbacks of ``fit``; it changes nothing.

    After each step it only keeps a reference to the logs, which Keras creates anyway.
    The reporter asks for the other data about once a second.
    """

    def __init__(self, reporter: Reporter) -> None:
        super().__init__()
        self._reporter = reporter
        self._epoch = 0
        self._step = 0
        self._steps: int | None = None
        """The number of steps in the last epoch."""
        self._logs: Mapping[str, object] = {}

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._reporter.position = self._tfcluster_position

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._epoch, self._step, self._logs = epoch + 1, 0, {}

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        # In threads, the call for an earlier step may come later.
        if batch >= self._step:
            self._step, self._logs = batch + 1, logs or {}

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._steps = self._step or None
        self._reporter.epoch(epoch + 1, logs or {})

    def _tfcluster_position(self) -> EpochPosition:
        params = self.params or {}
        epochs, steps = params.get("epochs"), params.get("steps") or self._steps
        return EpochPosition(
            self._epoch, epochs, self._step, steps, numbers(self._logs)
        )
