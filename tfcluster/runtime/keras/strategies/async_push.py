"""Asynchronous ranks push their gradients to the ps tasks, and receive new weights.

As in DistBelief's Downpour SGD (Dean et al., NIPS 2012): the answer to a push has the
weights after the rank's own gradients were applied, and all that arrived before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.collective.sparse import Slices
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.exchange.reduced_tensors import reduced
from tfcluster.runtime.exchange.tensor_list import Kind, TensorList
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.graph_order import exchange_in_order, refuse_xla
from tfcluster.runtime.keras.object_map import ObjectMap
from tfcluster.runtime.keras.strategies.ps_models import ServerModel, ServerModels
from tfcluster.runtime.keras.tf_variables import have_values, made_at_once, raw
from tfcluster.runtime.keras.training_session import Session
from tfcluster.runtime.keras.types import Optimizer, Variable
from tfcluster.runtime.parameter_server.client import Rows
from tfcluster.runtime.tensor_types import Gradient, Tensor
from tfcluster.runtime.tensors import is_sparse

_NOTHING, _ROWS, _WHOLE = range(3)
"""The ps tasks' answer for a sparse gradient."""

Received: TypeAlias = Sequence[Array | Rows | None]
"""The ps tasks' answer for a variable; None if the variable has not changed."""


class AsyncPush:
    """The hook on ``Optimizer.apply``: the optimizer's update runs on the ps tasks.

    ``pushed`` is called after each push, with the name of the optimizer.
    """

    def __init__(
        self,
        session: Session,
        server_models: ServerModels,
        pushed: Callable[[str], None],
    ) -> None:
        self._session = session
        self._server_models = server_models
        self._pushed = pushed
        self._hooked = ObjectMap[bool]()
        self._idle = False

    def install(self) -> None:
        """Install the hook in Keras, once per process."""
        patches.TABLE.install(
            {
                patches.OPTIMIZER_APPLY: self._apply,
                patches.LOSS_SCALE_APPLY: self._apply_loss_scaled,
            }
        )

    def set_idle(self, idle: bool) -> None:
        """If ``idle``, push nothing and only fetch weights in each step.

        Used while the batches that this rank computes also belong to another rank.
        """
        self._idle = idle

    def hooks(self, variables: Sequence[Variable]) -> bool:
        """Whether gradients for any of these variables have passed here."""
        return any(variable in self._hooked for variable in variables)

    def settle(self, what: str) -> None:
        """Pass on assignments, and fetch the latest weights."""
        self._server_models.pass_on_all_assignments()
        self._server_models.pull()

    def _apply(
        self,
        original: Callable[..., Variable],
        optimizer: Optimizer,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[Variable] | None = None,
    ) -> Variable:
        grads = list(grads)
        if self._session.within("apply") or not grads or reduced.applied(grads):
            return original(optimizer, grads, trainable_variables)
        refuse_xla()
        with self._session.once("apply"):
            variables = _built(optimizer, trainable_variables)
            if variables is None:
                # Keras reports what is missing.
                return original(optimizer, grads, trainable_variables)
            if self._push_all(optimizer, grads, variables):
                return optimizer.iterations
            return original(optimizer, grads, trainable_variables)

    def _apply_loss_scaled(
        self,
        original: Callable[..., Variable],
        optimizer: Optimizer,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[Variable] | None = None,
    ) -> Variable:
        """Build the optimizer; if gradients are finite, it calls the inner one."""
        grads = list(grads)
        if grads and not self._session.within("apply"):
            _built(optimizer, trainable_variables)
        return original(optimizer, grads, trainable_variables)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _push_all(
        self,
        optimizer: Optimizer,
        gradients: Sequence[Gradient],
        variables: Sequence[Variable],
    ) -> bool:
        """Push the gradients and set the variables to the new weights.

        Returns False if there are none to push or the variables have no values yet.
        Raises CollectiveError, when the step runs, if the ps tasks refuse the
        gradients.
        """
        internals.require_known(optimizer, variables)
        for variable in variables:
            self._hooked[variable] = True
        if not tf.executing_eagerly() and not have_values(variables):
            _refuse_to_run()
            return False
        ordered: list[Gradient] = [None] * len(internals.trained_variables(optimizer))
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None:
                place = internals.index_of(optimizer, variable)
                ordered[place] = _cast_like(variable, gradient)
        if all(gradient is None for gradient in ordered):
            return False  # Keras reports the error.
        given = TensorList.of(self._unscaled_and_clipped(optimizer, ordered))
        model = self._server_models.of(optimizer, "".join(k.value for k in given.kinds))
        answered = self._push(model, given)
        # Until the push, the local variables are compared with those on the ps tasks.
        with tf.control_dependencies(answered):
            raw(internals.iterations_of(optimizer)).assign_add(1)
        return True

    def _unscaled_and_clipped(
        self, optimizer: Optimizer, ordered: list[Gradient]
    ) -> list[Gradient]:
        scale = optimizer.loss_scale_factor
        if scale is not None:
            ordered = [None if g is None else cast(Tensor, g) / scale for g in ordered]
        if not self._server_models.clips_here(optimizer):
            return ordered
        given = [g for g in ordered if g is not None]
        clipped = iter(internals.clipped(optimizer, given))
        return [None if g is None else next(clipped) for g in ordered]

    def _push(self, model: ServerModel, gradients: TensorList) -> list[Tensor]:
        """Push the gradients and assign the answer, which is returned flat."""
        plain = [kind is Kind.DENSE for kind in gradients.kinds]
        types: list[tf.DType] = []
        for variable, whole in zip(model.variables, plain, strict=True):
            dtype = tf.as_dtype(variable.dtype)
            types += [dtype] if whole else [tf.int32, dtype, tf.int64]

        def run(*arrays: Array) -> list[Array | np.generic]:
            dense, sparse = gradients.unflattened(arrays)
            try:
                received = self._exchange(model, gradients.in_order(dense, sparse))
            except CollectiveError as error:
                self._session.group.keep(error)
                raise
            return _flat(model, plain, received)

        found = exchange_in_order(run, list(gradients.flat), types)
        answered: list[Tensor] = tf.nest.flatten(found)
        values = iter(answered)
        for variable, whole in zip(model.variables, plain, strict=True):
            target = raw(variable)
            if whole:
                value = tf.ensure_shape(next(values), target.shape)
                target.assign(value, read_value=False)
            else:
                _assign_received(target, next(values), next(values), next(values))
        return answered

    def _exchange(
        self, model: ServerModel, given: Sequence[Array | Slices | None]
    ) -> Received:
        servers = self._server_models.servers
        self._server_models.pushing(model)
        if self._idle or model.begun_elsewhere:
            model.begun_elsewhere = False
            received: Received = servers.pull(model.key)
        else:
            received = servers.push(model.key, given)
        self._pushed(model.key)
        return received


def _built(
    optimizer: Optimizer, trainable_variables: Sequence[Variable] | None
) -> list[Variable] | None:
    """The variables of the gradients; builds the optimizer if necessary.

    Its variables exist at once, even if a step, or a branch of it, is being traced.
    Returns None if the original method has to report what is missing.
    """
    if trainable_variables is None:
        return internals.trained_variables(optimizer) if optimizer.built else None
    variables = list(trainable_variables)
    if not optimizer.built:
        name = keras.name_scope(optimizer.name, caller=optimizer)
        with made_at_once(), tf.init_scope(), name:
            optimizer.build(variables)
        optimizer.built = True
    return variables


def _refuse_to_run() -> None:
    """Add an op to the current trace that raises CollectiveError when it runs.

    The trace creates the model's variables, so the ps tasks cannot have their values.
    TensorFlow discards it and traces again, unless it cannot compute the initial values
    outside of the function.
    """

    def run() -> np.bool_:
        raise CollectiveError(
            "the model's variables are created within a tf.function, and their initial "
            "values depend on what the function computes: call the model once before "
            "the training, or build it with model.build(input_shape)"
        )

    tf.numpy_function(run, [], tf.bool)


def _cast_like(variable: Variable, gradient: Gradient) -> Gradient:
    """Convert a gradient to the variable's dtype, which the ps tasks expect."""
    dtype = tf.as_dtype(variable.dtype)
    if is_sparse(gradient):
        values = tf.cast(gradient.values, dtype)
        indices = tf.cast(gradient.indices, tf.int64)
        return tf.IndexedSlices(values, indices, gradient.dense_shape)
    return tf.cast(tf.convert_to_tensor(gradient), dtype)


def _flat(
    model: ServerModel, plain: Sequence[bool], received: Received
) -> list[Array | np.generic]:
    """The ps tasks' answer for each variable, as arrays for the graph.

    For a dense gradient this is the variable's new value. For a sparse gradient there
    are three arrays: the kind of the answer (int32), values, and indices (int64).
    """
    flat: list[Array | np.generic] = []
    for variable, whole, value in zip(model.variables, plain, received, strict=True):
        dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
        none = np.empty(0, np.int64)
        if whole:
            if isinstance(value, Rows):
                raw(variable).scatter_update(
                    tf.IndexedSlices(value.values, value.indices)
                )
                value = None
            flat.append(raw(variable).numpy() if value is None else value)
        elif value is None:
            flat += [np.int32(_NOTHING), np.empty(0, dtype), none]
        elif isinstance(value, Rows):
            indices = np.asarray(value.indices, np.int64)
            flat += [np.int32(_ROWS), np.asarray(value.values, dtype), indices]
        else:
            flat += [np.int32(_WHOLE), np.asarray(value, dtype), none]
    return flat


def _assign_received(
    target: tf.Variable, kind: Tensor, values: Tensor, indices: Tensor
) -> None:
    indices.set_shape([None])
    kind.set_shape([])

    def rows() -> Tensor:
        shaped = tf.reshape(values, [-1, *target.shape[1:]])
        target.scatter_update(tf.IndexedSlices(shaped, indices))
        return tf.constant(0)

    def whole() -> Tensor:
        target.assign(tf.reshape(values, target.shape), read_value=False)
        return tf.constant(0)

    def nothing() -> Tensor:
        return tf.constant(0)

    acts: list[Callable[[], Tensor]] = [nothing, rows if target.shape.rank else nothing]
    tf.switch_case(kind, [*acts, whole])
