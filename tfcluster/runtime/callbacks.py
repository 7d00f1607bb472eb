"""Keras callbacks like Horovod's, for programs that distribute training by themselves.

They must be passed to ``fit`` on every rank, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, cast

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import ReduceOp, Signature
from tfcluster.runtime.collective.collectives import combine
from tfcluster.runtime.exchange.gather_broadcast import broadcast_variables
from tfcluster.runtime.horovod.settings import LocalSources
from tfcluster.runtime.keras import internals
from tfcluster.runtime.keras.types import KerasVariable, Optimizer
from tfcluster.runtime.process_group import group, is_chief, size

Logs: TypeAlias = dict[str, Any] | None
"""The logs that Keras passes to callbacks: numbers by the names of metrics."""


class BroadcastVariables(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Broadcasts weights and optimizer state of rank ``root_rank`` to all ranks.

    It does so when training begins, or after the first batch if the model is not yet
    built. It then raises ValueError if there is no such rank, CollectiveMismatchError
    on all ranks if the models differ, and another CollectiveError before ``init`` or if
    a rank is lost or late. ``local_variables``, a variable or several, are left out, as
    are those given to ``register_local_var``; ValueError if one is no variable.
    ``device`` is ignored. Follows
    ``BroadcastGlobalVariablesCallback`` of horovod/keras/callbacks.py.
    """

    def __init__(
        self,
        root_rank: int = 0,
        device: str = "",
        local_variables: KerasVariable | Iterable[KerasVariable] | None = None,
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._sent = False
        self._local = LocalSources()
        variables: Any = () if local_variables is None else local_variables
        for variable in (variables,) if _is_variable(variables) else variables:
            self.register_local_var(variable)

    def register_local_var(self, variable: KerasVariable) -> None:
        """Leave ``variable`` out. Raises ValueError if it is no variable."""
        if not _is_variable(variable):
            raise ValueError(f"local_variables: {variable!r} is no variable")
        self._local.add(variable)

    def on_train_begin(self, logs: Logs = None) -> None:
        """Broadcast if the model is built. Raises the errors of the class."""
        self._sent = False
        if self.model.built:
            self._tfcluster_send()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Broadcast after the first batch, unless already done."""
        if not self._sent:
            self._tfcluster_send()

    def _tfcluster_send(self) -> None:
        state = [*self.model.weights, *getattr(self.model.optimizer, "variables", ())]
        unique = {
            id(variable): variable
            for variable in state
            if not self._local.has(variable)
        }
        broadcast_variables(unique.values(), self.root_rank)
        self._sent = True


class MetricAverage(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Averages the logs of an epoch over the ranks, for the callbacks after this one.

    All scalar numbers are averaged in float64, with equal weights, and become Python
    floats. ``device`` is ignored. Raises CollectiveMismatchError on all ranks if their
    logs have different numbers, and another CollectiveError before ``init`` or if a
    rank is lost or late. Follows ``MetricAverageCallback`` of
    horovod/keras/callbacks.py.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Replace the numbers in ``logs`` with their averages."""
        if logs is None:
            return
        names = sorted(name for name, value in logs.items() if _is_number(value))
        values = [np.asarray(logs[name], np.float64) for name in names]
        signature = Signature("average of an epoch's logs", tuple(names))
        means, _ = combine(group(), values, [], ReduceOp.AVERAGE, signature)
        for name, mean in zip(names, means, strict=True):
            logs[name] = float(mean)


class LearningRateSchedule(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Sets the learning rate to ``initial_lr * multiplier(epoch)`` in some epochs.

    These are the epochs from ``start_epoch`` up to, but not including, ``end_epoch``,
    counted from 0. A number m as ``multiplier`` means ``m ** (epoch - start_epoch)``.
    With ``staircase`` the rate is set once per epoch, otherwise for every batch, with
    fractional epochs. The latter needs ``steps_per_epoch``, in batches, unless ``fit``
    knows it. ``initial_lr`` defaults to the optimizer's learning rate. The logs of each
    epoch get the rate as ``lr``.

    ``momentum_correction`` scales the velocity of SGD, which contains the old learning
    rate as a factor, by new rate / old rate: see Goyal et al., "Accurate, Large
    Minibatch SGD", 2017 (arXiv:1706.02677). Raises ValueError when training begins if
    ``steps_per_epoch`` is needed and unknown; Keras raises TypeError for an optimizer
    whose rate is a schedule.

    Follows ``LearningRateScheduleCallback`` of horovod/keras/callbacks.py.
    """

    def __init__(
        self,
        initial_lr: float | None = None,
        multiplier: float | Callable[[float], float] = 1.0,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.staircase = staircase
        self.multiplier: Callable[[float], float]
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            factor = multiplier
            self.multiplier = lambda epoch: factor ** (epoch - start_epoch)
        self._epoch = 0

    def on_train_begin(self, logs: Logs = None) -> None:
        """Determine the initial rate and the number of steps.

        Raises ValueError if the steps of an epoch are needed and unknown.
        """
        if self.initial_lr is None:
            self.initial_lr = float(self.model.optimizer.learning_rate)
        if self.steps_per_epoch is None:
            self.steps_per_epoch = self.params.get("steps")
        if not self.staircase and not self.steps_per_epoch:
            raise ValueError(
                "the number of steps in an epoch is unknown: pass steps_per_epoch"
            )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """With ``staircase``, set the rate of this epoch."""
        self._epoch = epoch
        if self.staircase:
            self._tfcluster_set(epoch)

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Without ``staircase``, set the rate of this batch."""
        if not self.staircase and self.steps_per_epoch:
            self._tfcluster_set(self._epoch + batch / self.steps_per_epoch)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Put the rate into ``logs``, as ``lr``."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _tfcluster_set(self, epoch: float) -> None:
        ended = self.end_epoch is not None and self._epoch >= self.end_epoch
        if self._epoch < self.start_epoch or ended or self.initial_lr is None:
            return
        optimizer = self.model.optimizer
        before = float(optimizer.learning_rate)
        after = self.initial_lr * self.multiplier(epoch)
        if after == before:
            return
        optimizer.learning_rate = after
        if self.momentum_correction and before:
            for velocity in _velocities(optimizer):
                velocity.assign(velocity * (after / before))


class LearningRateWarmup(LearningRateSchedule):
    """Raises the learning rate linearly from ``initial_lr / size()`` to ``initial_lr``.

    It does so batch by batch in the first ``warmup_epochs`` epochs, for scripts that
    multiply their learning rate by the number of ranks: the gradual warm-up of Goyal et
    al., arXiv:1706.02677. ``verbose`` prints a line when it is done. The other
    arguments and the errors are as for ``LearningRateSchedule``. Follows
    ``LearningRateWarmupCallback`` of horovod/keras/callbacks.py.
    """

    def __init__(
        self,
        initial_lr: float | None = None,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            initial_lr,
            self._tfcluster_warming,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Print a line on rank 0 when the warm-up has ended, if ``verbose``."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch == self.warmup_epochs - 1 and is_chief():
            rate = float(self.model.optimizer.learning_rate)
            print(  # noqa: T201  # what was asked for
                f"\nEpoch {epoch + 1}: the learning rate has warmed up to {rate:g}."
            )

    def _tfcluster_warming(self, epoch: float) -> float:
        # Count one batch ahead: the last batch of the warm-up has the full rate.
        done = epoch + 1 / (self.steps_per_epoch or 1)
        ranks = size()
        return (1 + done * (ranks - 1) / self.warmup_epochs) / ranks


class BestModelCheckpoint(
    keras.callbacks.ModelCheckpoint  # type: ignore[misc]  # untyped
):
    """A ModelCheckpoint with ``save_best_only``; only rank 0 writes.

    The arguments are Keras's. ``filepath`` may be set later. Raises ValueError if it is
    not set when training begins. Follows ``BestModelCheckpoint`` of
    horovod/keras/callbacks.py.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str | None = None,
    ) -> None:
        super().__init__(
            filepath or "unset.keras",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = filepath

    def on_train_begin(self, logs: Logs = None) -> None:
        """Like Keras's method. Raises ValueError if ``filepath`` is not set."""
        if self.filepath is None:
            raise ValueError("BestModelCheckpoint: set its filepath, to *.keras")
        super().on_train_begin(logs)

    def _save_model(self, epoch: int, batch: int | None, logs: Logs) -> None:
        if is_chief():
            internals.save_checkpoint(cast(Any, super()), epoch, batch, logs)


BroadcastGlobalVariablesCallback = BroadcastVariables
MetricAverageCallback = MetricAverage
LearningRateScheduleCallback = LearningRateSchedule
LearningRateWarmupCallback = LearningRateWarmup


def _velocities(optimizer: Optimizer) -> list[Any]:
    """The momentum variables of SGD, even within a LossScaleOptimizer."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(inner, keras.optimizers.SGD) and inner.momentum and inner.built:
        return list(inner.momentums)
    return []


def _is_variable(value: object) -> bool:
    return isinstance(value, tf.Variable | keras.Variable)


def _is_number(value: object) -> bool:
    array = np.asarray(value)
    return array.ndim == 0 and array.dtype.kind in "fiu"
