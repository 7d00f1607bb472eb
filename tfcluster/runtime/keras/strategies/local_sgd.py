"""Local SGD: ranks train independently, and their parameters are averaged periodically.

A rank applies its own gradients to its own weights. Every few steps, and before weights
are saved or evaluated, all ranks take the mean, weighted by the number of rows on which
each has trained since the last averaging: Stich, arXiv:1805.09767, with the weights of
federated averaging, McMahan et al., arXiv:1602.05629. The optimizers' slot variables
are not averaged: moments estimate the same gradient on every rank, and sending them
would double or triple the number of bytes.
"""

from __future__ import annotations

import struct
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import Signature
from tfcluster.runtime.collective.collectives import allgather_bytes
from tfcluster.runtime.collective.gradient_mean import mean_of_gradients
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras.checks.divergence_check import DivergenceCheck
from tfcluster.runtime.keras.object_map import ObjectMap
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.step_rows import StepRows
from tfcluster.runtime.keras.strategies.local_sgd_schedule import Drift, Schedule
from tfcluster.runtime.keras.types import Optimizer, Variable
from tfcluster.runtime.keras.variable_exchange import exchange_variables
from tfcluster.runtime.tensor_types import Gradient, Tensor
from tfcluster.runtime.tensors import is_sparse

_STATISTICS = struct.Struct(">dQ")
"""A replica's squared relative distance from the mean, and its proposed interval."""

_LEAST_ROWS = 1e-12
"""The weight of a rank without rows; not zero, in case no rank has any rows."""


@dataclass
class Replica:
    """The variables that one optimizer trains on this rank, and their progress."""

    name: str
    schedule: Schedule
    optimizer: weakref.ref[Optimizer]
    variables: dict[int, Variable] = field(default_factory=dict)
    """By id: the parameters, and the variables that layers update from their data."""
    steps: int = 0
    """The number of steps since the last averaging; ``rows`` likewise."""
    rows: float = 0.0
    since_s: float = 0.0
    """When the last averaging ended, by the clock of ``LocalSgdUpdate``."""
    drift: Drift = field(default_factory=Drift)


class LocalSgdUpdate:
    """The ``GradientUpdate`` of local SGD.

    Averages after ``every`` steps, or about every ``seconds``: see ``Schedule``.
    """

    def __init__(
        self,
        session: Session,
        divergence_check: DivergenceCheck,
        *,
        every: int | None = None,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._divergence_check = divergence_check
        self._every, self._seconds = every, seconds
        self._clock = clock
        self._replicas: list[Replica] = []
        self._by_optimizer = ObjectMap[Replica]()

    def before(
        self,
        optimizer: Optimizer,
        gradients: Sequence[Gradient],
        variables: Sequence[Variable],
        state: Sequence[Variable],
    ) -> list[Gradient] | None:
        """The rank's own gradients; zeros if it has no rows of this batch."""
        return _unless(self._has_rows(), gradients)

    def after(
        self,
        optimizer: Optimizer,
        variables: Sequence[Variable],
        state: Sequence[Variable],
    ) -> None:
        """Count the step, and average if an averaging is due."""
        replica = self._replica(optimizer)
        for variable in (*variables, *state):
            if tf.as_dtype(variable.dtype).is_floating:
                replica.variables.setdefault(id(variable), variable)
        rows = StepRows(self._session)

        def stepped(*counted: Array) -> np.bool_:
            return np.bool_(self._stepped(replica, rows.of(counted), rows.in_loop))

        due = _scalar(tf.numpy_function(stepped, rows.inputs, tf.bool))
        chosen = list(replica.variables.values())
        tf.cond(
            due,
            lambda: self._average_within(replica, chosen),
            lambda: tf.constant(False),
        )

    def settle(self, what: str) -> None:
        """Average everything that has been trained since the last averaging."""
        for replica in self._replicas:
            if replica.steps:
                chosen = list(replica.variables.values())
                with self._session.once("apply"), tf.init_scope():
                    self._average_within(replica, chosen)

    def _replica(self, optimizer: Optimizer) -> Replica:
        known = self._by_optimizer.get(optimizer)
        if known is None:
            schedule = Schedule(every=self._every, seconds=self._seconds)
            name = self._session.optimizer_names.of(optimizer)
            # The callback uses the replica before it exists, but runs only when the
            # optimizer is gone.
            replica: Replica
            ref = weakref.ref(optimizer, lambda _: self._forget(replica))
            replica = Replica(name, schedule, ref, since_s=self._clock())
            self._replicas.append(replica)
            known = self._by_optimizer[optimizer] = replica
        return known

    def _forget(self, replica: Replica) -> None:
        """Forget the variables of a lost optimizer, unless they need averaging."""
        if not replica.steps:
            replica.variables.clear()

    def _has_rows(self) -> bool | Tensor:
        """Whether this rank has rows in this step: True, False or a boolean tensor."""
        share = self._session.share
        if share is not None:
            return share.rows > 0
        loop = self._session.loop
        if tf.executing_eagerly():
            return loop.share.rows > 0
        return _scalar(
            tf.numpy_function(lambda: np.bool_(loop.share.rows > 0), [], tf.bool)
        )

    def _stepped(self, replica: Replica, rows: float, in_loop: bool) -> bool:
        """Count a step; return whether it is time to average."""
        session = self._session
        replica.steps += 1
        replica.rows += rows
        session.last_rows = rows
        session.applied(replica.name, in_loop=in_loop, exchanged=False)
        return replica.schedule.is_due(replica.steps)

    def _average_within(
        self, replica: Replica, variables: Sequence[Variable]
    ) -> Tensor:
        """Set ``variables`` to their mean over the ranks, eagerly or in a graph.

        Returns a boolean scalar, because a branch of ``tf.cond`` must return one.
        """

        def average(
            signature: Signature, arrays: Sequence[Array], scalars: Sequence[Array]
        ) -> list[Array]:
            return self._means(replica, arrays, scalars, signature)

        exchange_variables(
            f"parameters of {replica.name}",
            variables,
            average,
            self._divergence_check.hyperparameters(replica.name, replica.optimizer()),
        )
        return tf.constant(True)

    def _means(
        self,
        replica: Replica,
        arrays: Sequence[Array],
        scalars: Sequence[Array],
        signature: Signature,
    ) -> list[Array]:
        group, steps = self._session.group, replica.steps
        means, _ = mean_of_gradients(
            group,
            arrays,
            [],
            weight=max(replica.rows, _LEAST_ROWS),
            signature=signature,
            bucket_bytes=self._session.bucket_bytes,
        )
        now = self._clock()
        proposal = replica.schedule.proposal(steps, now - replica.since_s)
        ours = _STATISTICS.pack(_squared_distance(arrays, means), proposal)
        optimizers = [(replica.name, replica.optimizer())]
        check = self._divergence_check.look_at(
            optimizers, self._session.step_rate.steps, scalars
        )
        signature = Signature(f"drift of {replica.name}")
        statistics = [
            _STATISTICS.unpack(data)
            for data in allgather_bytes(group, ours, signature, check)
        ]
        replica.schedule.agreed(statistics[0][1])
        distance = float(np.sqrt(np.mean([each[0] for each in statistics])))
        if warning := replica.drift.saw(distance, steps):
            self._session.warn(warning)
        replica.steps, replica.rows, replica.since_s = 0, 0.0, self._clock()
        self._session.exchanged()
        return means


def _squared_distance(arrays: Sequence[Array], means: Sequence[Array]) -> float:
    """Squared distance of this rank's arrays from the means, relative to the means."""
    away = length = 0.0
    for array, mean in zip(arrays, means, strict=True):
        middle = np.asarray(mean).reshape(-1).astype(np.float32, copy=False)
        apart = np.asarray(array).reshape(-1).astype(np.float32) - middle
        away += float(np.dot(apart, apart))
        length += float(np.dot(middle, middle))
    return away / length if length else 0.0


def _unless(has_rows: bool | Tensor, gradients: Sequence[Gradient]) -> list[Gradient]:
    """The gradients, or zeros if ``has_rows`` is false."""
    if has_rows is True:
        return list(gradients)
    given = [gradient for gradient in gradients if gradient is not None]
    tensors = [tf.convert_to_tensor(g.values if is_sparse(g) else g) for g in given]
    if not tensors:
        return list(gradients)
    chosen = iter(
        tf.cond(
            tf.convert_to_tensor(has_rows),
            lambda: [tf.identity(tensor) for tensor in tensors],
            # Not 0 * x, which would be NaN for infinite x.
            lambda: [tf.zeros_like(tensor) for tensor in tensors],
        )
    )
    return [None if g is None else _with(g, next(chosen)) for g in gradients]


def _with(gradient: Gradient, tensor: Tensor) -> Gradient:
    if not is_sparse(gradient):
        return tensor
    return tf.IndexedSlices(tensor, gradient.indices, gradient.dense_shape)


def _scalar(tensor: Tensor) -> Tensor:
    tensor = tf.convert_to_tensor(tensor)
    return tf.reshape(tensor, [])
