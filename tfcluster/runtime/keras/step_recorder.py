"""Records what each training step computes, for ``tfcluster verify``.

The chief writes one line of ``events.jsonl`` for each gradient that an optimizer
applies, each result of a batch and each epoch, and the arrays of a gradient's step in a
file of their own. The other ranks only count. After the last step that was asked for,
every rank waits to be stopped. Changes nothing that the program computes.
"""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcluster.model import Strategy
from tfcluster.runtime import tf_patches
from tfcluster.runtime.context import Context, Recording
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.program_lines import user_line
from tfcluster.runtime.keras.train.xla_fallback import without_xla
from tfcluster.runtime.keras.types import Layer, Logs, Model, Optimizer, Variable
from tfcluster.runtime.tensor_types import Array, Gradient
from tfcluster.runtime.tensors import name_of

_NO_SLOTS = (Strategy.PARAMETER_SERVER, Strategy.REPLICATED)
"""Strategies that keep an optimizer's variables on the ps tasks."""


class StepRecorder:
    """The hooks on optimizers and models, outside of all others."""

    def __init__(self, recording: Recording, context: Context) -> None:
        self._folder = Path(recording.folder)
        self._steps = recording.steps
        self._writes = context.is_chief
        self._rank = context.rank
        self._slots = context.strategy not in _NO_SLOTS
        self._inside = threading.local()
        self._lock = threading.Lock()
        self._optimizers: dict[int, tuple[int, Optimizer]] = {}
        self._models: dict[int, tuple[int, Model]] = {}
        self._trained_models: dict[int, list[Model]] = {}
        """By the number of the optimizer."""
        self._clips: set[str] = set()
        self._count = 0

    def install(self) -> None:
        """Install the hooks in Keras and TensorFlow, once per process."""
        patches.TABLE.install(
            {
                patches.OPTIMIZER_APPLY: self._apply,
                patches.LOSS_SCALE_APPLY: self._apply,
                patches.MODEL_FIT: self._fit,
                patches.MODEL_EVALUATE: self._result,
                patches.MODEL_TRAIN_ON_BATCH: self._result,
                patches.MODEL_TEST_ON_BATCH: self._result,
            }
        )
        tf_patches.TABLE.install(
            {
                tf_patches.CLIP_BY_GLOBAL_NORM: self._clip,
                tf_patches.CLIP_BY_NORM: self._clip,
                tf_patches.CLIP_BY_VALUE: self._clip,
            }
        )

    # --- hooks ------------------------------------------------------------------------

    def _apply(
        self,
        original: Callable[..., Variable],
        optimizer: Optimizer,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[Variable] | None = None,
    ) -> Variable:
        if getattr(self._inside, "apply", False):
            return original(optimizer, grads, trainable_variables)
        self._inside.apply = True
        try:
            result = original(optimizer, grads, trainable_variables)
        finally:
            self._inside.apply = False
        self._applied(optimizer, trainable_variables)
        return result

    def _fit(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        without_xla(model)
        logs = _Logs(self, self._number_of(model))
        given = kwargs.get("callbacks")
        if isinstance(given, keras.callbacks.CallbackList):
            given.append(logs)
        else:
            theirs = [one for one in keras.tree.flatten(given) if one is not None]
            kwargs["callbacks"] = [*theirs, logs]
        self._inside.fit = True
        try:
            return original(model, *args, **kwargs)
        finally:
            self._inside.fit = False

    def _result(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        if getattr(self._inside, "fit", False):
            return original(model, *args, **kwargs)
        without_xla(model)
        result = original(model, *args, **kwargs)
        self.logs(original.__name__, self._number_of(model), _named(result))
        return result

    def _clip(self, *_: Any, **__: Any) -> None:
        if not getattr(self._inside, "apply", False):
            line = user_line()
            if line not in self._clips:
                self._clips.add(line)
                self._event({"kind": "clip", "line": line})

    # --- records ----------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _applied(self, optimizer: Optimizer, given: Sequence[Variable] | None) -> None:
        """Record the step's result now, or each time the graph being traced runs."""
        trained = list(given or internals.trained_variables(optimizer))
        number, new = self._optimizer_number(optimizer)
        if new:
            models = self._trained_models[number] = _models_of(trained)
            layers = sorted({type(layer).__name__ for layer in _layers_of(models)})
            self._event({"kind": "layers", "optimizer": number, "layers": layers})
        named = [("weight", name_of(one), one) for one in trained]
        states = _states_of(self._trained_models[number], trained)
        named += [("state", name_of(one), one) for one in states]
        if self._slots:
            known = {id(one) for one in trained}
            named += [
                ("slot", name_of(one), one)
                for one in optimizer.variables
                if id(one) not in known and "learning_rate" not in name_of(one)
            ]
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        tensors = [tf.convert_to_tensor(inner.learning_rate)]
        tensors += [tf.convert_to_tensor(one) for _, _, one in named]
        names = [["learning_rate", "learning_rate"]]
        names += [[kind, path] for kind, path, _ in named]

        def write(*arrays: Array) -> None:
            self._write_step(number, names, arrays)

        if tf.inside_function():
            tf.numpy_function(write, tensors, [])
        else:
            write(*(tensor.numpy() for tensor in tensors))

    def _write_step(
        self, number: int, names: list[list[str]], arrays: Sequence[Array]
    ) -> None:
        if self._steps is not None and self._count >= self._steps:
            self._wait_for_the_end()
        self._count += 1
        if not self._writes:
            return
        file = f"{self._count:06d}.npz"
        with (self._folder / file).open("wb") as out:
            # Sent to numpy by position: names of variables need not be distinct.
            np.savez(out, *(_portable(array) for array in arrays))
        self._event({"kind": "step", "optimizer": number, "file": file, "names": names})

    def logs(self, kind: str, model: int, logs: Logs) -> None:
        """Record losses and metrics as the program sees them: numbers by name.

        Raises OSError if the folder cannot be written.
        """
        values = {name: float(np.mean(value)) for name, value in logs.items()}
        self._event({"kind": kind, "model": model, "logs": values})

    def _event(self, event: Mapping[str, object]) -> None:
        if not self._writes:
            return
        with self._lock, (self._folder / "events.jsonl").open("a") as out:
            out.write(json.dumps(event) + "\n")

    def _wait_for_the_end(self) -> None:
        (self._folder / f"done-{self._rank}").touch()
        threading.Event().wait()

    def _optimizer_number(self, optimizer: Optimizer) -> tuple[int, bool]:
        """Number optimizers in the order in which they are first used."""
        new = id(optimizer) not in self._optimizers
        if new:
            self._optimizers[id(optimizer)] = len(self._optimizers), optimizer
        return self._optimizers[id(optimizer)][0], new

    def _number_of(self, model: Model) -> int:
        number = len(self._models)
        return self._models.setdefault(id(model), (number, model))[0]


class _Logs(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Passes on what ``fit`` tells its callbacks."""

    def __init__(self, recorder: StepRecorder, model: int) -> None:
        super().__init__()
        self._recorder = recorder
        self._number = model

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._recorder.logs("batch", self._number, logs or {})

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._recorder.logs("epoch", self._number, logs or {})


def _models_of(trained: Sequence[Variable]) -> list[Model]:
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


def _states_of(models: Sequence[Model], trained: Sequence[Variable]) -> list[Variable]:
    """The models' other variables, such as moving averages, but no random states."""
    found: dict[int, Variable] = {}
    known = {id(one) for one in trained}
    metrics = {
        id(one) for model in models for one in getattr(model, "metrics_variables", ())
    }
    for model in models:
        for one in model.weights:
            if id(one) not in known | metrics and internals.SEED_STATE not in name_of(
                one
            ):
                found.setdefault(id(one), one)
    return sorted(found.values(), key=name_of)


def _portable(array: Array) -> Array:
    """``array`` in a dtype that numpy can save; bfloat16 is not one."""
    array = np.asarray(array)
    return array if array.dtype.kind in "biufc" else array.astype(np.float32)


def _named(result: Any) -> dict[str, Any]:
    if isinstance(result, Mapping):
        return dict(result)
    values = result if isinstance(result, list | tuple) else [result]
    return {str(index): value for index, value in enumerate(values)}
