"""What ranks that train on their own rows add to the methods of a Keras model.

Weights are averaged before they are used, and logs are means over the ranks, so that
callbacks decide the same on all of them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import keras
import numpy as np

from tfcluster.protocol.wire import loads
from tfcluster.runtime.collective import NotDistributedError, Signature
from tfcluster.runtime.collective.collectives import allgather_bytes
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.strategies.local_sgd import LocalSgd
from tfcluster.runtime.keras.train.chief_only_saving import ChiefOnlySaving
from tfcluster.runtime.keras.train.injected_callbacks import looks_at_batches
from tfcluster.runtime.keras.train.partitioned_models import PartitionedModels
from tfcluster.runtime.keras.training_session import TrainingSession
from tfcluster.runtime.keras.types import Callback, Layer, Logs, Model
from tfcluster.runtime.tensor_types import Array

_LOOKS_AT_NO_WEIGHTS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.History,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.TerminateOnNaN,
)


class LocalSgdModels(PartitionedModels):
    """The hooks on the methods of a model."""

    def __init__(
        self, session: TrainingSession, files: ChiefOnlySaving, local_sgd: LocalSgd
    ) -> None:
        super().__init__(session, files)
        self._local_sgd = local_sgd

    def install(self) -> None:
        """Install the hooks in Keras, once per process."""
        super().install()
        patches.TABLE.install(
            {
                patches.MODEL_TRAIN_ON_BATCH: self._train_on_batch,
                patches.LAYER_GET_WEIGHTS: self._get_weights,
                patches.MODEL_METRICS_RESULT: self._metrics_result,
            }
        )

    def around(self, callbacks: Sequence[Callback]) -> list[Callback]:
        looks = any(
            not isinstance(callback, _LOOKS_AT_NO_WEIGHTS) for callback in callbacks
        )
        first = SharedLogs(
            self._session,
            self._local_sgd,
            every_epoch=looks,
            every_batch=any(map(looks_at_batches, callbacks)),
        )
        return [first, *super().around(callbacks)]

    def evaluate(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        session = self._session
        session.settle(f"evaluation of {model.name}")
        inner = session.inside_keras
        result = super().evaluate(original, model, *args, **kwargs)
        if session.divides or inner or original.__name__ != "evaluate":
            return result
        # Each rank has evaluated data of its own.
        flat = {str(i): number for i, number in enumerate(keras.tree.flatten(result))}
        means = list(shared(session, flat).values())
        return keras.tree.pack_sequence_as(result, means)

    def _train_on_batch(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        """Returns the metrics of all ranks' rows, in the form that Keras returns."""
        bound = inspect.signature(original).bind(model, *args, **kwargs)
        as_dict = bound.arguments.get("return_dict", False)
        bound.arguments["return_dict"] = True
        with self._session.entering():
            logs = original(*bound.args, **bound.kwargs)
        logs = shared(self._session, logs)
        return logs if as_dict else internals.flat_metrics(model, logs)

    def _get_weights(
        self, original: Callable[[Layer], list[Array]], layer: Layer
    ) -> list[Array]:
        if not self._session.within("saving"):
            self._session.settle(f"weights of {layer.name}")
        return original(layer)

    def _metrics_result(self, original: Callable[[Model], Logs], model: Model) -> Logs:
        """Merge the metrics over the ranks before they are read."""
        metrics = model.metrics
        self._local_sgd.merge(
            [variable for metric in metrics for variable in metric.variables]
        )
        return original(model)


class SharedLogs(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """The first callback of ``fit``: later ones get the same logs on all ranks.

    With ``every_epoch``, also the same weights at the end of each epoch; with
    ``every_batch``, the same logs of each batch, for a callback that may decide there.
    All get the same weights at the end.
    """

    def __init__(
        self,
        session: TrainingSession,
        local_sgd: LocalSgd,
        *,
        every_epoch: bool,
        every_batch: bool,
    ) -> None:
        super().__init__()
        self._session = session
        self._local_sgd = local_sgd
        self._every_epoch = every_epoch
        self._every_batch = every_batch
        self._steps = 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._steps = self._local_sgd.steps

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if self._every_batch:
            self._tfcluster_share(logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Raises NotDistributedError if nothing has been trained."""
        if self._local_sgd.steps == self._steps and self.model.trainable_variables:
            raise NotDistributedError(
                f"the script was not distributed: in epoch {epoch + 1} of "
                f"{self.model.name} no gradient passed through Optimizer.apply of a "
                "Keras optimizer, and no function computed gradients"
            )
        if self._every_epoch:
            self._session.settle(f"end of epoch {epoch + 1}")
        self._tfcluster_share(logs)

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._local_sgd.settle_weights(self.model.trainable_variables)

    def _tfcluster_share(self, logs: Logs | None) -> None:
        if logs:
            # CallbackList passes the same dictionary to all callbacks, in order.
            logs.update(shared(self._session, logs))


def shared(session: TrainingSession, logs: Logs) -> dict[str, Any]:
    """The logs with the means over the ranks of all numbers. All ranks call this."""
    names = sorted(name for name, value in logs.items() if _is_number(value))
    ours = json.dumps({name: float(logs[name]) for name in names}).encode()
    sent = allgather_bytes(session.group, ours, Signature("logs", tuple(names)))
    ranks = [loads(data) for data in sent]
    merged = dict(logs)
    for name in names:
        values = [float(rank_logs[name]) for rank_logs in ranks]
        if any(value != values[0] for value in values):
            merged[name] = float(np.mean(values))
    return merged


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) or (np.ndim(value) == 0 and hasattr(value, "dtype"))
