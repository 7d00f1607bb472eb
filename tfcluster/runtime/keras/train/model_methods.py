"""The hooks on ``fit``, ``evaluate`` and the other entry points of a Keras model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.exchange.error_translation import translated
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.checks.add_loss_check import AddLossCheck
from tfcluster.runtime.keras.checks.endless_epochs import warn_of_endless_epochs
from tfcluster.runtime.keras.checks.input_consistency import InputConsistency
from tfcluster.runtime.keras.checks.row_terms import RowTerms
from tfcluster.runtime.keras.checks.shape_errors import ShapeErrors
from tfcluster.runtime.keras.checks.trial_steps import TrialSteps
from tfcluster.runtime.keras.checks.unsupported_strategies import refuse_replicas
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.train.initial_broadcast import (
    InitialBroadcast,
    training_state,
)
from tfcluster.runtime.keras.train.injected_callbacks import (
    InjectedCallbacks,
    for_evaluation,
)
from tfcluster.runtime.keras.train.metrics import Metrics
from tfcluster.runtime.keras.train.sharded_steps import Looks, divide_steps
from tfcluster.runtime.keras.train.xla_fallback import without_xla
from tfcluster.runtime.keras.types import Layer, Model


class ModelMethods:
    """Wraps the methods of Keras's trainer that programs call."""

    def __init__(
        self,
        session: Session,
        synchroniser: InitialBroadcast,
        metrics: Metrics,
        callbacks: InjectedCallbacks,
        row_terms: RowTerms,
        shape_errors: ShapeErrors,
    ) -> None:
        self._session = session
        self._synchroniser = synchroniser
        self._metrics = metrics
        self._callbacks = callbacks
        self._shape_errors = shape_errors
        self._trial_steps = TrialSteps(session)
        self._looks = Looks(
            InputConsistency(session),
            AddLossCheck(session),
            self._trial_steps,
            row_terms,
        )

    def install(self) -> None:
        patches.TABLE.install(
            {
                patches.MODEL_FIT: self._fit,
                patches.MODEL_EVALUATE: self._evaluate,
                patches.MODEL_PREDICT: self._predict,
                patches.MODEL_TRAIN_ON_BATCH: self._on_batch,
                patches.MODEL_TEST_ON_BATCH: self._test_on_batch,
                patches.MODEL_PREDICT_ON_BATCH: self._predict,
                patches.LAYER_GET_WEIGHTS: self._get_weights,
                patches.MODEL_COMPILE: self._compile,
            }
        )
        self._trial_steps.install()

    def _fit(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        call = inspect.signature(original).bind(model, *args, **kwargs)
        callbacks = self._callbacks.around(call.arguments.get("callbacks"), model)
        call.arguments["callbacks"] = callbacks
        if not self._session.chief:
            call.arguments["verbose"] = 0
        warn_of_endless_epochs(self._session, call.arguments)
        self._refuse_states_of_rows(model)
        with self._entering(model):
            return original(*call.args, **call.kwargs)

    def _evaluate(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        outermost = not self._session.inside_keras
        call = inspect.signature(original).bind(model, *args, **kwargs)
        if outermost:
            callbacks = call.arguments.get("callbacks")
            call.arguments["callbacks"] = for_evaluation(
                callbacks, self._session, self._metrics
            )
        self._refuse_states_of_rows(model)
        with self._entering(model), self._metrics.testing():
            if outermost and model.built:
                self._synchroniser.ensure(training_state(model))
            self._session.settle(f"evaluation of {model.name}")
            return original(*call.args, **call.kwargs)

    def _predict(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        with self._entering(model):
            return original(model, *args, **kwargs)

    def _on_batch(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        call = inspect.signature(original).bind(model, *args, **kwargs)
        as_dict = call.arguments.get("return_dict", False)
        call.arguments["return_dict"] = True
        self._refuse_states_of_rows(model)
        with self._entering(model):
            logs = original(*call.args, **call.kwargs)
            logs = self._metrics.of_step(model, logs)
            return logs if as_dict else internals.flat_metrics(model, logs)

    def _test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        with self._metrics.testing():
            return self._on_batch(*args, **kwargs)

    def _get_weights(self, original: Callable[..., Any], layer: Layer) -> Any:
        if not self._session.within("saving"):
            self._session.settle(f"weights of {layer.name}")
        return original(layer)

    @contextmanager
    def _entering(self, model: Model) -> Iterator[None]:
        refuse_replicas(model.distribute_strategy)
        self._metrics.watch_steps(model)
        divide_steps(self._session, model, self._looks)
        without_xla(model)
        with translated(), self._shape_errors.in_fit(), self._session.entering():
            yield

    def _refuse_states_of_rows(self, model: Model) -> None:
        """Raise CollectiveError for a stateful RNN: it keeps a state for each row."""
        if not self._session.divides:
            return
        for layer in internals.layers_of(model):
            if isinstance(layer, keras.layers.RNN) and layer.stateful:
                raise CollectiveError(
                    f"the layer {layer.name} is stateful: it keeps a state for each "
                    "row of the batch, which cannot be divided among ranks"
                )

    def _compile(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        if kwargs.get("jit_compile") is True:
            self._session.warn(
                "compile(jit_compile=True): the model runs without XLA, because XLA "
                "cannot compile an exchange between ranks"
            )
        return original(model, *args, **kwargs)
