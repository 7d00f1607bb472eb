"""States that are committed and restored, for scripts that were written for elastic
Horovod.

The ranks of a run stay what they are while it goes on. Where one is lost, all end, and
the launcher starts them again (``restart`` in cluster.yaml), with fewer if need be. So
nothing is ever added to a running training; what a state can do within it is to share
rank 0's, to keep a copy, and to go back to it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime import process_group
from tfcluster.runtime.exchange.broadcast_variables import broadcast_variables
from tfcluster.runtime.exchange.objects import broadcast_object

T = TypeVar("T")
Reset = Callable[[], object]


def run(function: Callable[..., T]) -> Callable[..., T]:
    """``function(state, ...)``, which begins with rank 0's state on all ranks.

    What an exchange raises ends the program: the launcher starts it again where
    ``restart`` says so, and a checkpoint is what it goes on from.
    """

    @functools.wraps(function)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> T:
        process_group.init()
        state.sync()
        return function(state, *args, **kwargs)

    return wrapper


class ObjectState:
    """Python data, as attributes: what ``broadcast_object`` can send."""

    def __init__(
        self, bcast_object: Any = None, get_rank: Any = None, **attributes: Any
    ) -> None:
        self._names = tuple(attributes)
        self._saved: dict[str, Any] = {}
        self._resets: list[Reset] = []
        for name, value in attributes.items():
            setattr(self, name, value)
        ObjectState.save(self)

    def save(self) -> None:
        """Keep a copy in memory."""
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        """Be what was saved last."""
        for name, value in self._saved.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Be what rank 0's is, and save that."""
        if self._names:
            own = {name: getattr(self, name) for name in self._names}
            for name, value in broadcast_object(own, 0, name="state").items():
                setattr(self, name, value)
        self.save()

    def commit(self) -> None:
        """Save, and look for hosts that have come or gone."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Nothing: the hosts of a running training do not change."""

    def register_reset_callbacks(self, callbacks: Iterable[Reset]) -> None:
        """Have functions called by ``on_reset``."""
        self._resets.extend(callbacks)

    def on_reset(self) -> None:
        """Call what ``register_reset_callbacks`` was given."""
        self.reset()
        for callback in self._resets:
            callback()

    def reset(self) -> None:
        """For classes of a program's own to override."""


class TensorFlowState(ObjectState):
    """Variables of TensorFlow, and Python data."""

    def __init__(
        self, variables: Any = None, session: Any = None, **attributes: Any
    ) -> None:
        self._variables = None if variables is None else list(variables)
        self._session = session
        self._values: list[Any] = []
        super().__init__(**attributes)
        self.save()

    def variables(self) -> list[Any]:
        """Those of the state; by default all global ones of a graph of TensorFlow 1."""
        if self._variables is None:
            if tf.compat.v1.executing_eagerly_outside_functions():
                raise ValueError("TensorFlowState needs its variables: variables=[...]")
            return list(tf.compat.v1.global_variables())
        return self._variables

    def save(self) -> None:
        super().save()
        self._values = [np.array(value) for value in self._read(self.variables())]

    def restore(self) -> None:
        super().restore()
        for variable, value in zip(self.variables(), self._values, strict=True):
            self._set(variable, value)

    def sync(self) -> None:
        done = broadcast_variables(self.variables(), 0)
        if done is not None:
            self._in_session().run(done)
        super().sync()

    def _read(self, variables: list[Any]) -> list[Any]:
        if tf.compat.v1.executing_eagerly_outside_functions():
            return [keras.ops.convert_to_numpy(variable) for variable in variables]
        return list(self._in_session().run(variables))

    def _set(self, variable: Any, value: Any) -> None:
        if tf.compat.v1.executing_eagerly_outside_functions():
            variable.assign(value)
        else:
            variable.load(value, self._in_session())

    def _in_session(self) -> Any:
        session = self._session or tf.compat.v1.get_default_session()
        if session is None:
            raise ValueError("a graph of TensorFlow 1 needs a session: session=...")
        return session


class TensorFlowKerasState(TensorFlowState):
    """A Keras model and its optimizer, and Python data."""

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        backend: Any = None,
        **attributes: Any,
    ) -> None:
        if not model.built:
            raise ValueError(
                f"{model.name} has no weights yet: build it before its state is made"
            )
        self.model = model
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        super().__init__((), **attributes)

    def variables(self) -> list[Any]:
        state = [*self.model.weights, *getattr(self.optimizer, "variables", ())]
        return list({id(variable): variable for variable in state}.values())

    def restore(self) -> None:
        # Variables that the optimizer has made since begin as they did.
        known, values = self.variables(), list(self._values)
        values += [np.zeros(v.shape, str(v.dtype)) for v in known[len(values) :]]
        self._values = values
        super().restore()


KerasState = TensorFlowKerasState


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Commits a state every ``batches_per_commit`` batches, and after each epoch."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self._state = state
        self._every = batches_per_commit
        self._left = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self._left = self._every

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left == 0:
            self._state.commit()
            self._left = self._every

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Keeps the number of the batch in ``state.batch``, 0 at the end of an epoch."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Keeps the number of epochs that are done in ``state.epoch``."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state
        self._first = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._first = self._state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._state.epoch = self._first + epoch + 1
