"""The API of Elastic Horovod (``hvd.elastic``): states to commit, restore and sync.

The set of ranks does not change during a run. If a rank is lost, all ranks end, and the
launcher starts them again (``restart`` in cluster.yaml), with fewer ranks if necessary.
So hosts are never added to running training. A state can only be copied from rank 0 to
the others, saved in memory, and restored from there.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfcluster.runtime import process_group
from tfcluster.runtime.exchange.gather_broadcast import broadcast_variables
from tfcluster.runtime.exchange.objects import broadcast_object
from tfcluster.runtime.keras.types import KerasVariable, Model, Optimizer
from tfcluster.runtime.tf1_types import V1Session

T = TypeVar("T")
P = ParamSpec("P")
AnyState = TypeVar("AnyState", bound="Synchronised")
Reset = Callable[[], object]


class Synchronised(Protocol):
    """A state that ranks can share, such as ``ObjectState``."""

    def sync(self) -> None:
        """Copy the state of rank 0 to all ranks."""


def run(
    function: Callable[Concatenate[AnyState, P], T],
) -> Callable[Concatenate[AnyState, P], T]:
    """Wrap ``function(state, ...)``, so that all ranks begin with the state of rank 0.

    Unlike ``run`` of horovod/tensorflow/elastic.py, it does not retry: a
    CollectiveError ends the program. If ``restart`` is configured, the launcher starts
    the program again, which has to continue from a checkpoint. The wrapper raises what
    ``init`` and ``state.sync`` raise, and what the function raises.
    """

    @functools.wraps(function)
    def wrapper(state: AnyState, *args: P.args, **kwargs: P.kwargs) -> T:
        process_group.init()
        state.sync()
        return function(state, *args, **kwargs)

    return cast("Callable[Concatenate[AnyState, P], T]", wrapper)


class StateVariable(KerasVariable, Protocol):
    """A Keras or TensorFlow variable."""

    def load(self, value: npt.NDArray[Any], session: V1Session) -> None:
        """Set a TensorFlow 1 variable; other variables have ``assign``.

        ``value`` has the variable's shape and dtype.
        """


class ObjectState:
    """Python objects, as attributes; ``broadcast_object`` must support them.

    ``bcast_object`` and ``get_rank`` are ignored. Follows ``ObjectState`` of
    horovod/common/elastic.py.
    """

    def __init__(
        self, bcast_object: object = None, get_rank: object = None, **attributes: Any
    ) -> None:
        self._names = tuple(attributes)
        self._saved: dict[str, object] = {}
        self._resets: list[Reset] = []
        for name, value in attributes.items():
            setattr(self, name, value)
        ObjectState.save(self)

    def save(self) -> None:
        """Keep a copy in memory."""
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        """Restore the copy that was saved last."""
        for name, value in self._saved.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Copy the state of rank 0 to all ranks, and save it.

        Raises what ``broadcast_object`` raises: TypeError on all ranks if an attribute
        cannot be sent, CollectiveError.
        """
        if self._names:
            own = {name: getattr(self, name) for name in self._names}
            for name, value in broadcast_object(own, 0, name="state").items():
                setattr(self, name, value)
        self.save()

    def commit(self) -> None:
        """Save; ``check_host_updates`` is also called, as in Horovod."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Do nothing: hosts do not change during a run."""

    def register_reset_callbacks(self, callbacks: Iterable[Reset]) -> None:
        """Register functions to be called by ``on_reset``."""
        self._resets.extend(callbacks)

    def on_reset(self) -> None:
        """Call ``reset`` and the registered callbacks."""
        self.reset()
        for callback in self._resets:
            callback()

    def reset(self) -> None:
        """A hook for the program's subclasses."""


class TensorFlowState(ObjectState):
    """TensorFlow variables and Python objects.

    Values are kept in memory as arrays with the variables' shapes and dtypes. A
    TensorFlow 1 graph needs ``session`` or a default session when values are read or
    set; raises ValueError if there is none. Follows ``TensorFlowState`` of
    horovod/tensorflow/elastic.py.
    """

    def __init__(
        self,
        variables: Iterable[StateVariable] | None = None,
        session: V1Session | None = None,
        **attributes: Any,
    ) -> None:
        self._variables = None if variables is None else list(variables)
        self._session = session
        self._values: list[npt.NDArray[Any]] = []
        super().__init__(**attributes)
        self.save()

    def variables(self) -> list[StateVariable]:
        """The variables of the state; in a TF1 graph, all global variables by default.

        Raises ValueError if eager execution is enabled and no variables were given.
        """
        if self._variables is None:
            if tf.compat.v1.executing_eagerly_outside_functions():
                raise ValueError("TensorFlowState needs its variables: variables=[...]")
            return list(tf.compat.v1.global_variables())
        return self._variables

    def save(self) -> None:
        """Keep a copy of variables and objects in memory.

        Raises ValueError: see the class.
        """
        super().save()
        self._values = [np.array(value) for value in self._read(self.variables())]

    def restore(self) -> None:
        """Set variables and objects to their last saved values. Raises ValueError."""
        super().restore()
        for variable, value in zip(self.variables(), self._values, strict=True):
            self._set(variable, value)

    def sync(self) -> None:
        """Copy variables and objects of rank 0 to all ranks, and save them.

        Raises what ``broadcast_variables`` and ``broadcast_object`` raise, and
        ValueError.
        """
        done = broadcast_variables(self.variables(), 0)
        if done is not None:
            self._in_session().run(done)
        super().sync()

    def _read(self, variables: list[StateVariable]) -> list[npt.NDArray[Any]]:
        if tf.compat.v1.executing_eagerly_outside_functions():
            return [keras.ops.convert_to_numpy(variable) for variable in variables]
        return list(self._in_session().run(variables))

    def _set(self, variable: StateVariable, value: npt.NDArray[Any]) -> None:
        if tf.compat.v1.executing_eagerly_outside_functions():
            variable.assign(value)
        else:
            variable.load(value, self._in_session())

    def _in_session(self) -> V1Session:
        session: V1Session | None = self._session or tf.compat.v1.get_default_session()
        if session is None:
            raise ValueError("a graph of TensorFlow 1 needs a session: session=...")
        return session


class TensorFlowKerasState(TensorFlowState):
    """A Keras model, its optimizer, and Python objects.

    ``optimizer`` defaults to the model's optimizer; ``backend`` is ignored. Raises
    ValueError if the model is not built. Follows ``TensorFlowKerasState`` of
    horovod/tensorflow/elastic.py.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer | None = None,
        backend: object = None,
        **attributes: Any,
    ) -> None:
        if not model.built:
            raise ValueError(
                f"{model.name} has no weights yet: build it before its state is made"
            )
        self.model = model
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        super().__init__((), **attributes)

    def variables(self) -> list[StateVariable]:
        """The model's weights and the optimizer's variables, each once."""
        state = [*self.model.weights, *getattr(self.optimizer, "variables", ())]
        return list({id(variable): variable for variable in state}.values())

    def restore(self) -> None:
        """Set everything to the last saved values.

        Variables that the optimizer has created since then are set to zeros.
        """
        variables, values = self.variables(), list(self._values)
        values += [np.zeros(v.shape, str(v.dtype)) for v in variables[len(values) :]]
        self._values = values
        super().restore()


KerasState = TensorFlowKerasState


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Commits a state every ``batches_per_commit`` batches, and after each epoch.

    Follows ``CommitStateCallback`` of horovod/keras/elastic.py; the next two classes
    follow their counterparts there.
    """

    def __init__(self, state: ObjectState, batches_per_commit: int = 1) -> None:
        super().__init__()
        self._state = state
        self._every = batches_per_commit
        self._left = batches_per_commit

    def on_train_begin(self, logs: object = None) -> None:
        """Begin to count batches."""
        self._left = self._every

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Commit if enough batches have passed since the last commit."""
        self._left -= 1
        if self._left == 0:
            self._state.commit()
            self._left = self._every

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Commit."""
        self._state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Sets ``state.batch`` to the batch number, and to 0 at the end of an epoch."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Set ``state.batch`` to ``batch``, counted from 0."""
        self._state.batch = batch

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Set ``state.batch`` to 0."""
        self._state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Sets ``state.epoch`` to the number of completed epochs."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state
        self._first = 0

    def on_train_begin(self, logs: object = None) -> None:
        """Remember ``state.epoch``, in order to continue the count from it."""
        self._first = self._state.epoch

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Count this epoch."""
        self._state.epoch = self._first + epoch + 1
