"""Synchronous ranks whose optimizers update the variables on the ps tasks.

All ranks compute the same gradients (see ``tfcluster.runtime.partition``). A host
function takes the place of an optimizer's update: each rank sends its part of the
gradients to the ps tasks, and gets the new values of the variables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.exchange.graph_ops import call_with_arrays
from tfcluster.runtime.exchange.tensor_list import Kind, TensorList
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.object_map import ObjectMap
from tfcluster.runtime.keras.strategies.optimizer_replica import traits_of
from tfcluster.runtime.keras.strategies.optimizer_slots import unique
from tfcluster.runtime.keras.strategies.ps_models import (
    ServerModel,
    ServerModels,
    is_same_memory,
)
from tfcluster.runtime.keras.tf_variables import new_variable, raw
from tfcluster.runtime.keras.training_session import Session
from tfcluster.runtime.keras.types import Model, Optimizer, Variable
from tfcluster.runtime.parameter_server.client import Rows
from tfcluster.runtime.partition.exchange import IN_ORDER
from tfcluster.runtime.scripts import program_kind
from tfcluster.runtime.tensor_types import DType, Gradient, Tensor
from tfcluster.runtime.tensors import is_sparse


@dataclass(slots=True)
class _State:
    """One optimizer's variables, as this rank has last seen them."""

    known: dict[int, Array] = field(default_factory=dict)
    """Values by the variables' index. If a variable still has this memory, nobody has
    assigned to it: TensorFlow does not write to memory that others refer to."""
    rate: Array | None = None
    """The learning rate that the ps tasks have; None if they are to get it."""


class ServedUpdates:
    """The hooks on ``Optimizer.apply``, and on methods that compile it with XLA."""

    def __init__(self, session: Session, models: ServerModels) -> None:
        self._session = session
        self._models = models
        self._states = ObjectMap[_State]()
        with tf.device("CPU:0"):
            self._order = new_variable(False, name="order_of_updates")

    def install(self) -> None:
        """Install the hooks in Keras, once per process."""
        self._models.install()
        patches.TABLE.install(
            {
                patches.OPTIMIZER_APPLY: self._apply,
                patches.MODEL_FIT: self._without_xla,
                patches.MODEL_TRAIN_ON_BATCH: self._without_xla,
            }
        )

    def _without_xla(
        self, original: Callable[..., Any], model: Model, *args: Any, **kwargs: Any
    ) -> Any:
        """Train without XLA, which cannot compile a host function."""
        if model.compiled and model.jit_compile:
            model.jit_compile = False
            patches.TABLE.replace(patches.ONE_MODEL_TRAIN_FUNCTION, model, None)
            patches.TABLE.replace(patches.ONE_MODEL_TEST_FUNCTION, model, None)
        return original(model, *args, **kwargs)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _apply(
        self,
        original: Callable[..., Any],
        optimizer: Optimizer,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[Variable] | None = None,
    ) -> Any:
        grads = list(grads)
        # The hook before this one has claimed gradients that the program has combined.
        own = self._session.within("apply") or program_kind.distributes_itself()
        if not grads or own:
            return original(optimizer, grads, trainable_variables)
        variables = self._built(optimizer, trainable_variables)
        if variables is None or len(grads) != len(variables):
            # Keras reports the error.
            return original(optimizer, grads, trainable_variables)
        internals.require_known(optimizer, variables)
        ordered = _in_order(optimizer, grads, variables)
        if all(gradient is None for gradient in ordered):
            return original(optimizer, grads, trainable_variables)
        done = self._update(optimizer, TensorList.of(ordered))
        with tf.control_dependencies(done):
            raw(internals.iterations_of(optimizer)).assign_add(1)
        return None

    def _built(
        self, optimizer: Optimizer, given: Sequence[Variable] | None
    ) -> list[Variable] | None:
        """The variables of the gradients; builds the optimizer as Keras does."""
        if given is None:
            return internals.trained_variables(optimizer) if optimizer.built else None
        variables = list(given)
        if not optimizer.built:
            with keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(variables)
            optimizer.built = True
        return variables

    def _update(self, optimizer: Optimizer, gradients: TensorList) -> list[Tensor]:
        """Update the variables on the ps tasks, and assign their new values here."""
        variables = internals.trained_variables(optimizer)
        rows_only = traits_of(optimizer, clips_here=False).rows_only
        by_rows = [rows_only and kind is Kind.SPARSE for kind in gradients.kinds]
        whole = [index for index, rows in enumerate(by_rows) if not rows]
        types: list[DType] = [tf.as_dtype(variables[i].dtype) for i in whole]
        for variable, rows in zip(variables, by_rows, strict=True):
            types += [tf.as_dtype(variable.dtype), tf.int64] if rows else []

        def run(*arrays: Array) -> list[Array]:
            with self._session.once("apply"):
                return self._exchanged(optimizer, gradients, whole, arrays)

        # A function may assign to these variables before and after the update.
        rate = internals.rate_of(optimizer)
        read = [variables[i] for i in whole]
        read += [rate] if isinstance(rate, keras.Variable) else []
        inputs = [*gradients.flat, *(tf.convert_to_tensor(raw(v)) for v in read)]
        answered = self._called(run, inputs, types)
        found = iter(answered)
        for index in whole:
            target = raw(variables[index])
            value = tf.ensure_shape(next(found), target.shape)
            target.assign(value, read_value=False)
        for variable, rows in zip(variables, by_rows, strict=True):
            if rows:
                target = raw(variable)
                values = tf.ensure_shape(next(found), [None, *target.shape[1:]])
                indices = tf.ensure_shape(next(found), [None])
                target.scatter_update(tf.IndexedSlices(values, indices))
        return answered

    def _called(
        self,
        run: Callable[..., list[Array]],
        inputs: Sequence[Tensor],
        types: Sequence[DType],
    ) -> list[Tensor]:
        """Call ``run`` now, or in order with the other updates of the graph.

        TensorFlow keeps no order between an op and a branch that contains one, unless
        both use a variable.
        """
        if tf.executing_eagerly():
            return call_with_arrays(run, inputs, types)
        with tf.control_dependencies([self._order.read_value()]):
            found = tf.numpy_function(run, inputs, types, name=IN_ORDER)
        answered: list[Tensor] = tf.nest.flatten(found)
        with tf.control_dependencies(answered):
            self._order.assign(False, read_value=False)
        return answered

    def _exchanged(
        self,
        optimizer: Optimizer,
        gradients: TensorList,
        whole: Sequence[int],
        arrays: Sequence[Array],
    ) -> list[Array]:
        """The new values of the variables ``whole``; of the others values and indices.

        ``arrays`` are those of the gradients, then the present values of ``whole`` and
        of the learning rate, if that is a variable.
        """
        count = len(gradients.flat)
        given = gradients.in_order(*gradients.unflattened(arrays[:count]))
        read = list(map(np.asarray, arrays[count:]))
        present = dict(zip(whole, read, strict=False))
        rate = read[-1] if len(read) > len(whole) else None
        try:
            kinds = "".join(kind.value for kind in gradients.kinds)
            model = self._models.of(optimizer, kinds)
            state = self._state(optimizer, present)
            self._pass_on(model, state, present, rate)
            received = self._models.servers.push(model.key, given)
        except CollectiveError as error:
            self._session.group.keep(error)
            raise
        self._session.exchanged()
        results = []
        for index, old in present.items():
            state.known[index] = _value(received[index], old)
            results.append(state.known[index])
        for index, variable in enumerate(model.variables):
            if index not in present:
                # A value that is kept would be copied before its rows are set.
                state.known.pop(index, None)
                results += _rows(received[index], variable)
        return results

    def _state(self, optimizer: Optimizer, present: dict[int, Array]) -> _State:
        state = self._states.get(optimizer)
        if state is None:
            # The ps tasks have just got these values.
            state = self._states[optimizer] = _State(dict(present))
        return state

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
            known = state.known.get(index)
            if known is None or not _are_equal(value, known):
                values[paths[index]] = value
        looked_at = [paths[index] for index in present]
        if rate is not None:
            looked_at.append(self._models.rate_path(model))
            if state.rate is None or not _are_equal(rate, state.rate):
                values[looked_at[-1]] = state.rate = rate.copy()
        self._models.pushing(model, looked_at, values)


def _in_order(
    optimizer: Optimizer, gradients: Sequence[Gradient], variables: Sequence[Variable]
) -> list[Gradient]:
    """The gradients of all of the optimizer's variables, as the ps tasks expect them.

    Loss scaling is undone, and dtypes are those of the variables.
    """
    found: list[Gradient] = [None] * len(internals.trained_variables(optimizer))
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
        found[internals.index_of(optimizer, variable)] = gradient
    return found


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


def _value(received: Array | Rows | None, old: Array) -> Array:
    """A variable's new value; its old value if the ps tasks have not changed it."""
    if received is None:
        return old
    if isinstance(received, Rows):
        new = old.copy()
        new[received.indices] = received.values
        return new
    return np.asarray(received, old.dtype).reshape(old.shape)


def _rows(received: Array | Rows | None, variable: Variable) -> list[Array]:
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
