"""Optimizers that update the variables on the ps tasks.

A host function takes the place of an optimizer's update: it sends gradients to the ps
tasks, and gets the new values of the variables. Synchronous ranks compute the same
gradients (see ``tfcluster.runtime.partition``), and each sends its part of them.
Asynchronous ranks send their own, as in DistBelief's Downpour SGD (Dean et al., NIPS
2012): the answer has the weights after these were applied, and all that arrived before.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.contract import HandlerPlace
from tfcluster.runtime.exchange.graph_ops import call_with_arrays, unconverted
from tfcluster.runtime.exchange.reduce_engine import ReduceKind, TensorList
from tfcluster.runtime.exchange.reduced_tensors import reduced
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.strategies.optimizer_replica import traits_of, unique
from tfcluster.runtime.keras.strategies.ps_models import (
    ServerModel,
    ServerModels,
    is_same_memory,
    memory_of,
)
from tfcluster.runtime.keras.tf_variables import have_values, new_variable, raw
from tfcluster.runtime.keras.train.xla_fallback import refuse_xla, without_xla
from tfcluster.runtime.keras.training_session import TrainingSession
from tfcluster.runtime.keras.types import KerasVariable, Model, Optimizer
from tfcluster.runtime.parameter_server.client import Rows
from tfcluster.runtime.partition.exchange import IN_ORDER
from tfcluster.runtime.scripts import program_kind
from tfcluster.runtime.tensor_types import DType, Gradient, Tensor
from tfcluster.runtime.tensor_types import Variable as TfVariable
from tfcluster.runtime.tensors import is_sparse


@dataclass(slots=True)
class _State:
    """One optimizer's variables, as this rank has last seen them."""

    on_servers: dict[int, Array] = field(default_factory=dict)
    """Values by the variables' index. If a variable still has this memory, nobody has
    assigned to it: TensorFlow does not write to memory that others refer to."""
    rate: Array | None = None
    """The learning rate that the ps tasks have; None if they are to get it."""


class ServedUpdates:
    """The hooks on ``Optimizer.apply``, and on methods that compile it with XLA.

    ``pushed`` is called after each push, with the name of the optimizer.
    """

    def __init__(
        self,
        session: TrainingSession,
        models: ServerModels,
        pushed: Callable[[str], None] = lambda optimizer: None,
    ) -> None:
        self._session = session
        self._models = models
        self._pushed = pushed
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._states: weakref.WeakKeyDictionary[Optimizer, _State] = (
            weakref.WeakKeyDictionary()
        )
        self.idle = False
        """If true, push nothing and only fetch weights in each step: the batches that
        this rank computes also belong to another rank."""

    def install(self) -> None:
        """Install the hooks in Keras, once per process."""
        self._models.install()
        patches.TABLE.install(
            {
                patches.OPTIMIZER_APPLY: self._apply,
                patches.MODEL_FIT: self._without_xla,
                patches.MODEL_TRAIN_ON_BATCH: self._without_xla,
            },
            HandlerPlace.SERVICE,
        )

    def has_gradients_of(self, variables: Sequence[KerasVariable]) -> bool:
        """Whether an optimizer of any of these variables has passed here."""
        ids = {id(variable) for variable in variables}
        return any(
            id(trained) in ids
            for optimizer in self._optimizers
            for trained in internals.trained_variables(optimizer)
        )

    def _without_xla(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        """Train without XLA, which cannot compile a host function."""
        if without_xla(model) and not self._models.synchronous:
            self._session.warn(
                f"{model.name} runs without XLA, as with compile(jit_compile=False), "
                "because XLA cannot compile a push of gradients. Keras would use it "
                "here: jit_compile is True, or 'auto' on a GPU. With XLA, layers such "
                "as Dropout draw other random numbers"
            )
        return original(model, *args, **kwargs)

    @unconverted
    def _apply(
        self,
        original: Callable[..., Any],
        optimizer: Optimizer,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[KerasVariable] | None = None,
    ) -> Any:
        grads = list(grads)
        own = (
            self._session.within("apply")
            or program_kind.distributes_itself()
            or reduced.applied(grads)
        )
        if not grads or own:
            return original(optimizer, grads, trainable_variables)
        if not self._models.synchronous:
            refuse_xla()
        variables = self._built(optimizer, trainable_variables)
        if variables is None or len(grads) != len(variables):
            # Keras reports the error.
            return original(optimizer, grads, trainable_variables)
        internals.require_known(optimizer, variables)
        self._optimizers.add(optimizer)
        ordered = _in_order(optimizer, grads, variables)
        if all(gradient is None for gradient in ordered):
            return original(optimizer, grads, trainable_variables)
        if self._models.clips_here(optimizer):
            present = [gradient for gradient in ordered if gradient is not None]
            clipped = iter(internals.clipped(optimizer, present))
            ordered = [
                None if gradient is None else next(clipped) for gradient in ordered
            ]
        gradients = TensorList.of(ordered)
        if not self._models.synchronous:
            self._open_early(optimizer, gradients)
        done = self._update(optimizer, gradients)
        with tf.control_dependencies(done):
            raw(internals.iterations_of(optimizer)).assign_add(1)
        return optimizer.iterations

    def _open_early(self, optimizer: Optimizer, gradients: TensorList) -> None:
        """Get the ps tasks' weights while a function is being traced, before its step.

        A function that creates variables is traced once more when they have values.
        """
        if tf.executing_eagerly():
            return
        with self._session.once("apply"):
            if have_values(
                [*internals.trained_variables(optimizer), *optimizer.variables]
            ):
                self._models.of(optimizer, _kinds(gradients))

    def _built(
        self, optimizer: Optimizer, declared: Sequence[KerasVariable] | None
    ) -> list[KerasVariable] | None:
        """The variables of the gradients; builds the optimizer as Keras does."""
        if declared is None:
            return internals.trained_variables(optimizer) if optimizer.built else None
        variables = list(declared)
        if not optimizer.built:
            with keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(variables)
            optimizer.built = True
        return variables

    def _update(self, optimizer: Optimizer, gradients: TensorList) -> list[Tensor]:
        """Update the variables on the ps tasks, and assign their new values here."""
        variables = internals.trained_variables(optimizer)
        rows_only = traits_of(optimizer, clips_here=False).rows_only
        by_rows = [rows_only and kind is ReduceKind.SPARSE for kind in gradients.kinds]
        whole = [index for index, rows in enumerate(by_rows) if not rows]
        types: list[DType] = [tf.as_dtype(variables[i].dtype) for i in whole]
        for variable, rows in zip(variables, by_rows, strict=True):
            types += [tf.as_dtype(variable.dtype), tf.int64] if rows else []

        def run(*arrays: Array) -> list[Array]:
            with self._session.once("apply"):
                return self._exchanged(optimizer, gradients, whole, arrays)

        read: list[KerasVariable] = []
        if self._models.synchronous:
            # A function may assign to these variables before and after the update.
            rate = internals.rate_of(optimizer)
            read = [variables[i] for i in whole]
            read += [rate] if isinstance(rate, keras.Variable) else []
        inputs = [*gradients.flat, *(tf.convert_to_tensor(raw(v)) for v in read)]
        answered = called_in_order(run, inputs, types)
        results = iter(answered)
        for index in whole:
            target = raw(variables[index])
            value = tf.ensure_shape(next(results), target.shape)
            target.assign(value, read_value=False)
        for variable, rows in zip(variables, by_rows, strict=True):
            if rows:
                target = raw(variable)
                values = tf.ensure_shape(next(results), [None, *target.shape[1:]])
                indices = tf.ensure_shape(next(results), [None])
                target.scatter_update(tf.IndexedSlices(values, indices))
        return answered

    def _exchanged(
        self,
        optimizer: Optimizer,
        gradients: TensorList,
        whole: Sequence[int],
        arrays: Sequence[Array],
    ) -> list[Array]:
        """The new values of the variables ``whole``; of the others values and indices.

        ``arrays`` are those of the gradients. Of synchronous ranks, the present values
        of ``whole`` follow, and of the learning rate, if that is a variable.
        """
        count = len(gradients.flat)
        ordered = gradients.in_order(*gradients.unflattened(arrays[:count]))
        read = list(map(np.asarray, arrays[count:]))
        present = dict(zip(whole, read, strict=False))
        rate = read[-1] if len(read) > len(whole) else None
        try:
            model = self._models.of(optimizer, _kinds(gradients))
            # At first, the ps tasks have just got these values.
            state = self._states.setdefault(optimizer, _State(dict(present)))
            self._pass_on(model, state, present, rate)
            received: Sequence[Array | Rows | None]
            if self.idle or model.begun_elsewhere:
                model.begun_elsewhere = False
                received = self._models.servers.pull(model.key)
            else:
                received = self._models.servers.push(model.key, ordered)
        except CollectiveError as error:
            self._session.group.keep(error)
            raise
        self._session.reporter.exchanged()
        self._pushed(model.key)
        results = []
        for index in whole:
            variable = model.variables[index]
            results.append(_value(received[index], variable, present.get(index)))
            if index in present:
                state.on_servers[index] = results[-1]
        for index, variable in enumerate(model.variables):
            if index not in whole:
                # A value that is kept would be copied before its rows are set.
                state.on_servers.pop(index, None)
                results += _rows(received[index], variable)
        return results

    def _pass_on(
        self,
        model: ServerModel,
        state: _State,
        present: dict[int, Array],
        rate: Array | None,
    ) -> None:
        """Let the ps tasks know what the program has assigned since the last update."""
        paths = unique(model.variables)
        values = {}
        for index, value in present.items():
            server_value = state.on_servers.get(index)
            if server_value is None or not _are_equal(value, server_value):
                values[paths[index]] = value
        looked_at = [paths[index] for index in present]
        if rate is not None:
            looked_at.append(self._models.rate_path(model))
            if state.rate is None or not _are_equal(rate, state.rate):
                values[looked_at[-1]] = state.rate = rate.copy()
        self._models.pushing(model, looked_at, values)


def called_in_order(
    run: Callable[..., list[Array]], inputs: Sequence[Tensor], types: Sequence[DType]
) -> list[Tensor]:
    """Call ``run`` now, or in order with the other updates of the graph.

    ``run`` gets arrays and returns arrays of dtypes ``types``. TensorFlow keeps no
    order between an op and a branch that contains one, unless both use a variable.
    """
    if tf.executing_eagerly():
        return call_with_arrays(run, inputs, types)
    with tf.control_dependencies([_order().read_value()]):
        results = tf.numpy_function(run, inputs, types, name=IN_ORDER)
    answered: list[Tensor] = tf.nest.flatten(results)
    with tf.control_dependencies(answered):
        _order().assign(False, read_value=False)
    return answered


@functools.cache
def _order() -> TfVariable:
    """One variable per process: functions that call each other must share it."""
    with tf.device("CPU:0"):
        return new_variable(False, name="order_of_updates")


def _kinds(gradients: TensorList) -> str:
    return "".join(kind.value for kind in gradients.kinds)


def _in_order(
    optimizer: Optimizer,
    gradients: Sequence[Gradient],
    variables: Sequence[KerasVariable],
) -> list[Gradient]:
    """The gradients of all of the optimizer's variables, as the ps tasks expect them.

    Loss scaling is undone, and dtypes are those of the variables.
    """
    ordered: list[Gradient] = [None] * len(internals.trained_variables(optimizer))
    scale = optimizer.loss_scale_factor
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is None:
            continue
        if scale is not None and not getattr(
            variable, "overwrite_with_gradient", False
        ):
            gradient = cast(Tensor, gradient) / scale
        dtype = tf.as_dtype(variable.dtype)
        if is_sparse(gradient):
            values = tf.cast(gradient.values, dtype)
            indices = tf.cast(gradient.indices, tf.int64)
            gradient = tf.IndexedSlices(values, indices, gradient.dense_shape)
        else:
            gradient = tf.cast(tf.convert_to_tensor(gradient), dtype)
        ordered[internals.index_of(optimizer, variable)] = gradient
    return ordered


def _are_equal(one: Array, other: Array) -> bool:
    if is_same_memory(one, other):
        return True
    return np.array_equal(_bits(one), _bits(other))


def _bits(array: Array) -> Array:
    """The numbers' bits: NaN is not equal to itself, and zeros have signs."""
    width = array.dtype.itemsize
    return (
        np.ascontiguousarray(array).reshape(-1).view(f"u{width}" if width < 9 else "u8")
    )


def _value(
    received: Array | Rows | None, variable: KerasVariable, present: Array | None
) -> Array:
    """A variable's new value; its present value if the ps tasks have not changed it."""
    if received is not None and not isinstance(received, Rows):
        dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
        return np.asarray(received, dtype).reshape(tuple(variable.shape))
    old = memory_of(variable) if present is None else present
    if received is None:
        return old
    new = old.copy()
    new[received.indices] = received.values
    return new


def _rows(received: Array | Rows | None, variable: KerasVariable) -> list[Array]:
    """The values and indices of the rows to set."""
    dtype, shape = tf.as_dtype(variable.dtype).as_numpy_dtype, tuple(variable.shape)
    if received is None:
        return [np.empty((0, *shape[1:]), dtype), np.empty(0, np.int64)]
    if isinstance(received, Rows):
        return [np.asarray(received.values, dtype), received.indices]
    return [
        np.asarray(received, dtype).reshape(shape),
        np.arange(shape[0], dtype=np.int64),
    ]
