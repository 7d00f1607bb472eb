"""Records what each training step computes, for ``tfcluster verify``.

An event is a gradient that an optimizer applies, the result of a batch, or an epoch;
``recording_files`` writes the events. Recording changes nothing that the program
computes.
"""

from __future__ import annotations

import gc
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfcluster.plan.model import Strategy
from tfcluster.runtime import tf_internals, tf_patches
from tfcluster.runtime.context import Context
from tfcluster.runtime.contract import HandlerPlace
from tfcluster.runtime.exchange.graph_ops import unconverted
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.moved_gradients import moved_gradients, rounding_unit
from tfcluster.runtime.keras.strategies.served_updates import called_in_order
from tfcluster.runtime.keras.train.injected_callbacks import changed_callbacks
from tfcluster.runtime.keras.train.xla_fallback import without_xla
from tfcluster.runtime.keras.types import KerasVariable, Layer, Logs, Model, Optimizer
from tfcluster.runtime.recording_files import RecordingFiles
from tfcluster.runtime.tensor_types import Array, Gradient
from tfcluster.runtime.tensors import name_of
from tfcluster.runtime.tf_internals import TracedFunction

_Applied: TypeAlias = dict[int, tuple[Optimizer, Sequence[KerasVariable] | None]]
"""Optimizers and the variables that they have changed, by the optimizers' ids."""

_SERVED = (Strategy.PARAMETER_SERVER, Strategy.REPLICATED)
"""Strategies that keep an optimizer's variables on the ps tasks."""


class StepRecorder:
    """The hooks on optimizers and models, outside of all other hooks."""

    def __init__(self, files: RecordingFiles, context: Context) -> None:
        self._files = files
        self._fetches_slots = context.strategy in _SERVED
        self._slots = not self._fetches_slots or (
            # Asynchronous ranks change the variables all the time.
            context.strategy is Strategy.REPLICATED or context.options.synchronous
        )
        self._inside = threading.local()
        self._compiled: weakref.WeakKeyDictionary[TracedFunction, _Applied] = (
            weakref.WeakKeyDictionary()
        )
        """What functions that XLA compiles apply, found when they were traced."""
        self._models: dict[int, tuple[int, Model]] = {}
        self._trained_models: dict[int, list[Model]] = {}
        """The trained models, by the number of the optimizer."""

    def install(self) -> None:
        """Install the hooks in Keras, once per process."""
        patches.TABLE.install(
            {
                patches.OPTIMIZER_APPLY: self._apply,
                patches.LOSS_SCALE_APPLY: self._apply,
                patches.MODEL_FIT: self._fit,
                patches.MODEL_EVALUATE: self._result,
                patches.MODEL_TRAIN_ON_BATCH: self._result,
                patches.MODEL_TEST_ON_BATCH: self._result,
            },
            HandlerPlace.RECORD,
            always=True,
        )
        tf_patches.TABLE.install(
            {tf_patches.FUNCTION_CALL: self._call}, HandlerPlace.RECORD, always=True
        )

    # --- hooks ------------------------------------------------------------------------

    def _apply(
        self,
        original: Callable[..., KerasVariable],
        optimizer: Optimizer,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[KerasVariable] | None = None,
    ) -> KerasVariable:
        if getattr(self._inside, "apply", False):
            return original(optimizer, grads, trainable_variables)
        self._inside.apply = True
        try:
            unit = rounding_unit()
            self._files.note_once({"kind": "rounding", "unit": unit})
            grads = moved_gradients(grads, unit, moved=self._files.moved)
            result = original(optimizer, grads, trainable_variables)
        finally:
            self._inside.apply = False
        applied: _Applied | None = getattr(self._inside, "compiled", None)
        if applied is not None and tf.inside_function():
            applied[id(optimizer)] = optimizer, trainable_variables
        else:
            self._applied(optimizer, trainable_variables)
        return result

    def _call(
        self,
        original: Callable[..., Any],
        function: TracedFunction,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Record what a function applies behind it: XLA compiles no host function."""
        is_within = getattr(self._inside, "compiled", None) is not None
        if is_within or not tf_internals.is_for_xla(function):
            return original(function, *args, **kwargs)
        applied = self._compiled.setdefault(function, {})
        self._inside.compiled = applied
        try:
            result = original(function, *args, **kwargs)
        finally:
            self._inside.compiled = None
        for optimizer, variables in applied.values():
            self._applied(optimizer, variables)
        return result

    def _fit(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        if not self._files.xla:
            without_xla(model)
        number = self._number_of(model)
        logs = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda _, logs: self._logs("batch", number, logs or {}),
            on_epoch_end=lambda _, logs: self._logs("epoch", number, logs or {}),
        )
        bound = inspect.signature(original).bind(model, *args, **kwargs)
        given = bound.arguments.get("callbacks")
        self._inside.fit = True
        try:
            with changed_callbacks(given, model, lambda own: [*own, logs]) as changed:
                bound.arguments["callbacks"] = changed
                return original(*bound.args, **bound.kwargs)
        finally:
            self._inside.fit = False

    def _result(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        if getattr(self._inside, "fit", False):
            return original(model, *args, **kwargs)
        if not self._files.xla:
            without_xla(model)
        result = original(model, *args, **kwargs)
        self._logs(original.__name__, self._number_of(model), _named(result))
        return result

    # --- records ----------------------------------------------------------------------

    @unconverted
    def _applied(
        self, optimizer: Optimizer, variables: Sequence[KerasVariable] | None
    ) -> None:
        """Record the step's result now, or each time the graph being traced runs."""
        trained = list(variables or internals.trained_variables(optimizer))
        number, new = self._files.optimizer_number(optimizer)
        if new:
            models = self._trained_models[number] = _models_of(trained)
            layers = sorted({type(layer).__name__ for layer in _layers_of(models)})
            self._files.event({"kind": "layers", "optimizer": number, "layers": layers})
        named = [("weight", name_of(one), one) for one in trained]
        states = _states_of(self._trained_models[number], trained)
        named += [("state", name_of(one), one) for one in states]
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        fetched: list[KerasVariable] = []
        if self._slots:
            trained_ids = {id(one) for one in trained}
            slots = [
                one
                for one in optimizer.variables
                if id(one) not in trained_ids and "learning_rate" not in name_of(one)
            ]
            if self._fetches_slots:
                fetched = slots
            else:
                named += [("slot", name_of(one), one) for one in slots]
        tensors = [tf.convert_to_tensor(inner.learning_rate)]
        tensors += [tf.convert_to_tensor(one) for _, _, one in named]
        names = [["learning_rate", "learning_rate"]]
        names += [[kind, path] for kind, path, _ in named]
        names += [["slot", name_of(one)] for one in fetched]

        def write(*arrays: Array) -> None:
            self._files.step(number, names, arrays)

        def write_fetched(*arrays: Array) -> list[Array]:
            if self._files.writes:
                # Reading the property fetches the slots from the ps tasks.
                _ = inner.variables
            # The first array only ensures the order.
            slots = [np.asarray(one.numpy()) for one in fetched]
            self._files.step(number, names, [*arrays[1:], *slots])
            return [np.array(True)]

        if fetched:
            # Run after the update has counted its step, and before the next push.
            count = tf.convert_to_tensor(internals.iterations_of(inner))
            called_in_order(write_fetched, [count, *tensors], [tf.bool])
        elif tf.inside_function():
            tf.numpy_function(write, tensors, [])
        else:
            write(*(tensor.numpy() for tensor in tensors))

    def _logs(self, kind: str, model: int, logs: Logs) -> None:
        """Record losses and metrics as the program sees them: numbers by name.

        Raises OSError if the folder cannot be written.
        """
        values = {name: float(np.mean(value)) for name, value in logs.items()}
        self._files.event({"kind": kind, "model": model, "logs": values})

    def _number_of(self, model: Model) -> int:
        number = len(self._models)
        return self._models.setdefault(id(model), (number, model))[0]


def _models_of(trained: Sequence[KerasVariable]) -> list[Model]:
    """The models that contain one of ``trained``; found among all living objects."""
    ids = {id(one) for one in trained}
    return [
        one
        for one in gc.get_objects()
        if isinstance(one, keras.Model)
        and any(id(variable) in ids for variable in one.trainable_variables)
    ]


def _layers_of(models: Sequence[Model]) -> list[Layer]:
    return [layer for model in models for layer in internals.layers_of(model)]


def _states_of(
    models: Sequence[Model], trained: Sequence[KerasVariable]
) -> list[KerasVariable]:
    """The models' other variables, such as moving averages, but no random states."""
    states: dict[int, KerasVariable] = {}
    trained_ids = {id(one) for one in trained}
    metrics = {
        id(one) for model in models for one in getattr(model, "metrics_variables", ())
    }
    for model in models:
        for one in model.weights:
            if id(
                one
            ) not in trained_ids | metrics and internals.SEED_STATE not in name_of(one):
                states.setdefault(id(one), one)
    return sorted(states.values(), key=name_of)


def _named(result: Any) -> dict[str, Any]:
    if isinstance(result, Mapping):
        return dict(result)
    values = result if isinstance(result, list | tuple) else [result]
    return {str(index): value for index, value in enumerate(values)}
