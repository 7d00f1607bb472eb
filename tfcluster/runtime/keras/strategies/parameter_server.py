"""Parameter servers: push gradients to the ps tasks, and receive the new weights.

Synchronous ranks get the weights after the mean of all ranks' gradients was applied, as
with TensorFlow 1's ``SyncReplicasOptimizer`` (Chen et al., arXiv:1604.00981).
Asynchronous ranks get the weights after their own gradients were applied, as in
DistBelief's Downpour SGD (Dean et al., NIPS 2012).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, TypeAlias, cast

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import CollectiveError, ReduceOp, Signature
from tfcluster.runtime.collective.collectives import allgather_bytes, reduce_arrays
from tfcluster.runtime.collective.gradient_mean import mean_of_gradients
from tfcluster.runtime.collective.sparse import Slices
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.exchange.tensor_list import Kind, TensorList
from tfcluster.runtime.keras import internals
from tfcluster.runtime.keras.checks.divergence_check import DivergenceCheck
from tfcluster.runtime.keras.graph_order import exchange_in_order
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.step_rows import StepRows
from tfcluster.runtime.keras.strategies.collective import CollectiveUpdate
from tfcluster.runtime.keras.strategies.ps_models import ServerModel, ServerModels
from tfcluster.runtime.keras.tf_variables import have_values, raw
from tfcluster.runtime.keras.train.common_indices import marked, may_be_common
from tfcluster.runtime.keras.train.tape_gradients import TapeGradients
from tfcluster.runtime.keras.types import Optimizer, Variable
from tfcluster.runtime.keras.variable_exchange import exchange_variables
from tfcluster.runtime.parameter_server.client import Rows
from tfcluster.runtime.tensor_types import Gradient, Tensor
from tfcluster.runtime.tensors import is_sparse

_NOTHING, _ROWS, _WHOLE = range(3)
"""The ps tasks' answer for a sparse gradient."""

Received: TypeAlias = Sequence[Array | Rows | None]
"""The ps tasks' answer for a variable; None if the variable has not changed."""


class PsUpdate:
    """The ``GradientUpdate`` that pushes gradients; the answer has the new weights.

    ``divergence_check`` compares the optimizers' settings of synchronous ranks.
    ``tape_gradients`` knows which gradients the tapes have already exchanged.
    """

    def __init__(
        self,
        session: Session,
        server_models: ServerModels,
        *,
        divergence_check: DivergenceCheck | None = None,
        tape_gradients: TapeGradients | None = None,
    ) -> None:
        self._session = session
        self._server_models = server_models
        self._divergence_check = divergence_check
        self._looked_at = 0
        self._tape_gradients = tape_gradients
        self._collective = (
            None
            if tape_gradients is None
            else CollectiveUpdate(session, tape_gradients)
        )
        self._idle = False

    def before(
        self,
        optimizer: Optimizer,
        gradients: Sequence[Gradient],
        variables: Sequence[Variable],
        state: Sequence[Variable],
    ) -> list[Gradient] | None:
        """Push the gradients and set the variables to the new weights.

        Returns None, so that Keras's own update does not run, or the gradients if there
        are none to push or the variables have no values yet. Raises CollectiveError,
        when the step runs, if the ps tasks refuse the gradients.
        """
        internals.require_known(optimizer, variables)
        if not tf.executing_eagerly() and not have_values(variables):
            self._refuse_to_run()
            return list(gradients)
        identical = False
        if self._tape_gradients is not None and self._collective is not None:
            own = self._tape_gradients.still_to_exchange(
                optimizer, gradients, variables
            )
            identical = not all(own)
            if identical:
                found = self._collective.before(optimizer, gradients, variables, [])
                gradients = found or gradients
        ordered: list[Gradient] = [None] * len(internals.trained_variables(optimizer))
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None:
                place = internals.index_of(optimizer, variable)
                ordered[place] = _cast_like(variable, gradient)
        if all(gradient is None for gradient in ordered):
            return list(gradients)  # Keras reports the error.
        ordered = self._unscaled_and_clipped(optimizer, ordered)
        given = TensorList.of(ordered)
        model = self._server_models.of(optimizer, "".join(k.value for k in given.kinds))
        if state and self._session.size > 1:
            self._average(state)
        answered = self._push(model, given, identical=identical)
        # Until the push, the local variables are compared with those on the ps tasks.
        with tf.control_dependencies(answered):
            raw(internals.iterations_of(optimizer)).assign_add(1)
        return None

    def _refuse_to_run(self) -> None:
        """Add an op to the current trace that raises CollectiveError when it runs.

        The trace creates the model's variables, so the ps tasks cannot have their
        values. TensorFlow discards it and traces again, unless it cannot compute the
        initial values outside of the function.
        """

        def run() -> NoReturn:
            self._session.refuse(
                "the model's variables are created within a tf.function, and their "
                "initial values depend on what the function computes: call the model "
                "once before the training, or build it with model.build(input_shape)"
            )

        tf.numpy_function(run, [], tf.bool)

    def after(
        self,
        optimizer: Optimizer,
        variables: Sequence[Variable],
        state: Sequence[Variable],
    ) -> None:
        """Do nothing."""

    def set_idle(self, idle: bool) -> None:
        """If ``idle``, push nothing and only fetch weights in each step.

        Used while the batches that this rank computes also belong to another rank.
        """
        self._idle = idle

    def settle(self, what: str) -> None:
        """Pass on assignments; asynchronous ranks also fetch the latest weights."""
        self._server_models.pass_on_all_assignments()
        if not self._server_models.synchronous:
            self._server_models.pull()
        self._compare()

    def _compare(self) -> None:
        """Check that all ranks have the same optimizer settings; the chief's are used.

        The weights need no check: all ranks got the same weights in the last answer.
        """
        session = self._session
        if self._divergence_check is None or session.size == 1:
            return
        if self._looked_at == session.applies:
            return
        self._looked_at = session.applies
        look = self._divergence_check.look_at(
            self._server_models.optimizers(), session.step_rate.steps
        )
        allgather_bytes(
            session.group, b"", Signature("settings of the optimizers"), look
        )

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def agreed_on_infinities(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """The gradients, made non-finite if any rank's gradients are non-finite.

        Non-finite gradients never reach the inner optimizer of a LossScaleOptimizer,
        which does the push. So synchronous ranks skip the same steps.
        """
        if not self._server_models.synchronous or self._session.size == 1:
            return list(gradients)
        given = [
            gradient.values if is_sparse(gradient) else gradient
            for gradient in gradients
            if gradient is not None
        ]
        own = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in given])
        nan_or_zero = exchange_in_order(self._nan_unless_all_finite, [own], tf.float32)
        nan_or_zero.set_shape([])
        marked = list(gradients)
        place, first = next((i, g) for i, g in enumerate(marked) if g is not None)
        if is_sparse(first):
            values = first.values + tf.cast(nan_or_zero, first.values.dtype)
            marked[place] = tf.IndexedSlices(values, first.indices, first.dense_shape)
        else:
            marked[place] = first + tf.cast(nan_or_zero, first.dtype)
        return marked

    def _nan_unless_all_finite(self, finite: Array) -> np.float32:
        """0 if the gradients of all ranks are finite, else NaN."""
        signature = Signature("whether gradients are finite")
        vote = np.array([bool(finite)], np.int64)
        votes = reduce_arrays(self._session.group, [vote], ReduceOp.MIN, signature)
        all_finite = bool(votes[0][0])
        if not all_finite:
            # The step is skipped, but it counts as an exchange of all ranks.
            self._session.applies += 1
            self._session.exchanged()
        summand: np.float32 = np.float32(0.0 if all_finite else np.nan)
        return summand

    def _unscaled_and_clipped(
        self, optimizer: Optimizer, ordered: list[Gradient]
    ) -> list[Gradient]:
        if optimizer.loss_scale_factor is not None:
            ordered = [
                None if g is None else cast(Tensor, g) / optimizer.loss_scale_factor
                for g in ordered
            ]
        if not self._server_models.clips_here(optimizer):
            return ordered
        given = [g for g in ordered if g is not None]
        clipped = iter(internals.clipped(optimizer, given))
        return [None if g is None else next(clipped) for g in ordered]

    def _average(self, state: Sequence[Variable]) -> None:
        """Average variables that layers update over the ranks, weighted by rows."""
        rows = StepRows(self._session)

        def mean(
            signature: Signature, arrays: Sequence[Array], counted: Sequence[Array]
        ) -> Sequence[Array]:
            means, _ = mean_of_gradients(
                self._session.group,
                arrays,
                [],
                weight=rows.weight(counted),
                signature=signature,
            )
            return means

        exchange_variables("moving averages", state, mean, rows.inputs)

    def _push(
        self, model: ServerModel, gradients: TensorList, *, identical: bool
    ) -> list[Tensor]:
        """Push the gradients and assign the answer, which is returned flat.

        With ``identical``, all ranks have the same gradients; only the chief's count.
        """
        rows = StepRows(self._session)
        known = len(rows.inputs)
        common = list(map(may_be_common, gradients.indices))
        inputs = [*rows.inputs, *gradients.flat]
        plain = [kind is Kind.DENSE for kind in gradients.kinds]
        types: list[tf.DType] = []
        for variable, whole in zip(model.variables, plain, strict=True):
            dtype = tf.as_dtype(variable.dtype)
            types += [dtype] if whole else [tf.int32, dtype, tf.int64]

        def run(*arrays: Array) -> list[Array | np.generic]:
            weight = rows.weight(arrays[:known])
            dense, sparse = gradients.unflattened(arrays[known:])
            sparse = [
                marked(each, weight, may_be_common=may)
                for each, may in zip(sparse, common, strict=True)
            ]
            given = gradients.in_order(dense, sparse)
            try:
                received = self._exchange(
                    model, given, weight, in_loop=rows.in_loop, identical=identical
                )
            except CollectiveError as error:
                self._session.group.keep(error)
                raise
            return _flat(model, plain, received)

        answered: list[Tensor] = tf.nest.flatten(exchange_in_order(run, inputs, types))
        found = iter(answered)
        for variable, whole in zip(model.variables, plain, strict=True):
            target = raw(variable)
            if whole:
                value = tf.ensure_shape(next(found), target.shape)
                target.assign(value, read_value=False)
            else:
                _assign_received(target, next(found), next(found), next(found))
        return answered

    def _exchange(
        self,
        model: ServerModel,
        given: Sequence[Array | Slices | None],
        weight: float,
        *,
        in_loop: bool,
        identical: bool,
    ) -> Received:
        session, servers = self._session, self._server_models.servers
        self._server_models.pushing(model)
        in_loop = in_loop and not session.inside_keras
        if self._idle or model.begun_elsewhere:
            model.begun_elsewhere = False
            received: Received = servers.pull(model.key)
        else:
            weight = weight if self._server_models.synchronous else 1.0
            session.last_rows = weight
            if identical:
                weight = float(session.chief)
            received = servers.push(model.key, given)
        session.applied(model.key, in_loop=in_loop)
        return received


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
