"""The behaviour that synchronous ranks add to the methods of a Keras model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import keras

from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.keras import internals
from tfcluster.runtime.keras.checks.trial_steps import has_own_step
from tfcluster.runtime.keras.metrics.metrics import Metrics
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.train.initial_broadcast import (
    InitialBroadcast,
    training_state,
)
from tfcluster.runtime.keras.train.injected_callbacks import (
    InjectedCallbacks,
    for_evaluation,
)
from tfcluster.runtime.keras.train.model_methods import MethodCall
from tfcluster.runtime.keras.train.sharded_steps import StepChecks, divide_steps
from tfcluster.runtime.keras.types import Callback, CallbackList, Layer, Model
from tfcluster.runtime.tensor_types import Nest


class SynchronousTraining:
    """The implementation of ``TrainingPolicy`` for ranks that train in lockstep.

    Each rank computes its rows of every batch, and metrics cover all ranks' rows.
    """

    def __init__(
        self,
        session: Session,
        initial_broadcast: InitialBroadcast,
        metrics: Metrics,
        callbacks: InjectedCallbacks,
        checks: StepChecks,
    ) -> None:
        self._session = session
        self._initial_broadcast = initial_broadcast
        self._metrics = metrics
        self._callbacks = callbacks
        self._checks = checks

    def check_layers(self, model: Model) -> None:
        """Raise CollectiveError for a stateful RNN whose rows cannot be divided.

        With ``local_sgd``, ranks do not exchange states. A trial of a custom step gives
        a rank other rows than the rows of its states.
        """
        session = self._session
        if not session.waits_in_steps:
            why = "under local_sgd"
        elif session.trials is not None and has_own_step(model):
            why = "in a custom train_step or compute_loss"
        else:
            return
        if not session.divides:
            return
        for layer in internals.layers_of(model):
            if isinstance(layer, keras.layers.RNN) and layer.stateful:
                raise CollectiveError(
                    f"the layer {layer.name} is stateful: it keeps a state for each "
                    f"row of the batch, which cannot be divided among ranks {why}"
                )

    def prepare(self, model: Model) -> None:
        self._metrics.watch_steps(model)
        divide_steps(self._session, model, self._checks)

    def callbacks_of_fit(self, callbacks: Sequence[Callback]) -> list[Callback]:
        return self._callbacks.around(callbacks)

    def callbacks_of_evaluation(self, callbacks: Nest) -> CallbackList | list[Callback]:
        return for_evaluation(callbacks, self._session, self._metrics)

    def fitting(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def evaluating(self, model: Model, *, outermost: bool) -> Iterator[None]:
        with self._metrics.testing():
            if outermost and model.built:
                self._initial_broadcast.ensure(training_state(model))
            self._session.settle(f"evaluation of {model.name}")
            yield

    def train_on_batch(self, call: MethodCall) -> object:
        """Return the metrics of all ranks' rows, in the form that Keras returns."""
        return self._on_batch(call)

    def test_on_batch(self, call: MethodCall) -> object:
        """Return the metrics of all ranks' rows, in the form that Keras returns."""
        with self._metrics.testing():
            return self._on_batch(call)

    def _on_batch(self, call: MethodCall) -> object:
        as_dict = call.arguments.get("return_dict", False)
        call.arguments["return_dict"] = True
        logs = self._metrics.of_step(call.model, call.run())
        return logs if as_dict else internals.flat_metrics(call.model, logs)

    def before_get_weights(self, layer: Layer) -> None:
        if not self._session.within("saving"):
            self._session.settle(f"weights of {layer.name}")
