"""The hooks on the methods of a Keras model that print, take callbacks, or end.

Also on the batches that these methods read, whose computation ranks divide.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import ReduceOp, Signature
from tfcluster.runtime.collective.collectives import reduce_arrays
from tfcluster.runtime.exchange.error_translation import translated
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.train.chief_only_saving import ChiefOnlySaving
from tfcluster.runtime.keras.train.injected_callbacks import (
    FitPosition,
    changed_callbacks,
    looks_at_batches,
    with_chief_only_files,
)
from tfcluster.runtime.keras.train.predictions import can_keep_rows, rows_kept
from tfcluster.runtime.keras.training_session import TrainingSession
from tfcluster.runtime.keras.types import Callback, EpochIterator, Logs, Model
from tfcluster.runtime.partition.hook import Hook
from tfcluster.runtime.partition.placement import Split
from tfcluster.runtime.telemetry.tracer import KERAS, span
from tfcluster.runtime.tensor_types import Dataset


class StopAgreement(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Begins with the chief's variables, and stops on all ranks at the same time.

    A callback of the program may decide by a clock, and a file may be on one host only.
    """

    def __init__(
        self,
        session: TrainingSession,
        begin: Callable[[Model], None],
        *,
        in_epochs: bool,
    ) -> None:
        super().__init__()
        self._session = session
        self._begin = begin
        self._in_epochs = in_epochs

    def on_train_begin(self, logs: Logs | None = None) -> None:
        first = str(internals.initial_epoch(self.model) or 0)
        first = self._session.agreed(first, "first epoch")
        internals.set_initial_epoch(self.model, int(first) or None)
        self._begin(self.model)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if self._in_epochs:
            self._tfcluster_stop_together()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._tfcluster_stop_together()

    def _tfcluster_stop_together(self) -> None:
        stops = np.array([bool(self.model.stop_training)], np.int64)
        anywhere = reduce_arrays(
            self._session.group, [stops], ReduceOp.MAX, Signature("whether to stop")
        )
        self.model.stop_training = bool(anywhere[0][0])


class PartitionedModels:
    """The hooks on the methods of a model that print or take callbacks.

    ``begin`` is called when ``fit`` begins; without it, ranks may end at any time. The
    ranks divide what ``predict`` calls by ``hook``, if there is one. ``divide_input``
    returns a dataset that yields the same batches, with which functions that take one
    batch may read their rows of it only.
    """

    def __init__(
        self,
        session: TrainingSession,
        files: ChiefOnlySaving,
        begin: Callable[[Model], None] | None = None,
        hook: Hook | None = None,
        divide_input: Callable[[Dataset], Dataset] | None = None,
    ) -> None:
        self._hook = hook
        self._session = session
        self._files = files
        self._begin = begin
        self._divide_input = divide_input
        self._models: list[Model] = []
        """Those whose methods run, the innermost last."""

    def install(self) -> None:
        """Install the hooks in Keras, once per process."""
        patches.TABLE.install(
            {
                patches.MODEL_FIT: self.fit,
                patches.MODEL_EVALUATE: self.evaluate,
                patches.MODEL_PREDICT: self._predict,
            }
        )
        if self._divide_input is not None:
            patches.TABLE.install({patches.EPOCH_ITERATOR: self._epochs})

    def _epochs(
        self,
        original: Callable[..., None],
        iterator: EpochIterator,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        original(iterator, *args, **kwargs)
        assert self._divide_input is not None
        takes_one_batch = (
            iterator.steps_per_execution == 1
            and bool(self._models)
            and not self._models[-1].run_eagerly
            and not tf.config.functions_run_eagerly()
        )
        if takes_one_batch and internals.reads_dataset(iterator):
            dataset = self._divide_input(internals.dataset_of(iterator))
            internals.set_dataset(iterator, dataset)

    def _predict(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        session, hook = self._session, self._hook
        is_outermost = not session.within("predicting")
        with session.once("predicting"):
            bound = inspect.signature(original).bind(model, *args, **kwargs)
            callbacks = bound.arguments.get("callbacks")
            if hook is None or not is_outermost or not can_keep_rows(model, callbacks):
                return self.evaluate(original, model, *args, **kwargs)
            group = session.group
            with rows_kept(model, hook, Split(group.rank, group.size)) as predictions:
                result = self.evaluate(original, model, *args, **kwargs)
            with translated():
                return predictions.whole(group, result)

    def fit(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        """Run ``fit``, the function ``original``."""
        bound = inspect.signature(original).bind(model, *args, **kwargs)
        arguments = bound.arguments

        def change(callbacks: Sequence[Callback]) -> list[Callback]:
            return [*self.around(callbacks), FitPosition(self._session.reporter)]

        with (
            changed_callbacks(arguments.get("callbacks"), model, change) as changed,
            translated(),
            self._running(model),
            span(self._session.group.tracer, KERAS, f"fit of {model.name}"),
            self._session.reporter.keeping_position(),
        ):
            arguments["callbacks"] = changed
            return original(*bound.args, **bound.kwargs)

    def around(self, callbacks: Sequence[Callback]) -> list[Callback]:
        """The program's callbacks and the strategy's."""
        all_callbacks = with_chief_only_files(callbacks, self._session, self._files)
        if self._begin is not None:
            in_epochs = any(map(looks_at_batches, callbacks))
            stop = StopAgreement(self._session, self._begin, in_epochs=in_epochs)
            all_callbacks.append(stop)
        return all_callbacks

    def evaluate(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        """Run ``evaluate`` or ``predict``, the function ``original``."""
        bound = inspect.signature(original).bind(model, *args, **kwargs)
        tracer = None
        if not self._session.inside_keras:
            tracer = self._session.group.tracer
        what = f"{original.__name__} of {model.name}"
        with translated(), self._running(model), span(tracer, KERAS, what):
            return original(*bound.args, **bound.kwargs)

    @contextmanager
    def _running(self, model: Model) -> Iterator[None]:
        with self._session.entering():
            self._models.append(model)
            try:
                yield
            finally:
                self._models.remove(model)
