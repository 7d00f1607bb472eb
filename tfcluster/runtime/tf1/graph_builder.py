"""The parts that all training graphs have in common, whichever copies they train on.

Each variable is placed on the parameter server that holds the fewest bytes. The
placement depends only on the order of creation, which is the same on every worker. So
all workers compute the same placement without communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import tensorflow as tf

from tfcluster.runtime.errors import CollectiveMismatchError
from tfcluster.runtime.tensor_types import (
    DType,
    Gradient,
    Operation,
    ProtocolBuffer,
    Tensor,
    Variable,
)
from tfcluster.runtime.tensors import is_sparse
from tfcluster.runtime.tf1 import session_manager
from tfcluster.runtime.tf1.barrier import Barriers
from tfcluster.runtime.tf1.cluster_members import Workers
from tfcluster.runtime.tf1.cluster_members import workers as all_workers
from tfcluster.runtime.tf1_types import (
    Coordinator,
    SessionRunContext,
    SessionRunHook,
    V1Optimizer,
    V1Session,
)

_SHARE_SLACK = 1.1
"""The promised balance: within a tenth of an even share."""

_MIN_SAID_BYTES = 1 << 20
"""Warn only about larger variables: smaller ones do not matter."""


def dtype_and_shape(
    op: Operation | ProtocolBuffer,
) -> tuple[DType | None, tuple[int, ...] | None]:
    """A variable op's dtype and shape, each None if unknown.

    ``op`` is an operation or its ``NodeDef``.
    """
    node: Any = getattr(op, "node_def", op)
    if "dtype" not in node.attr or "shape" not in node.attr:
        return None, None
    shape = tf.TensorShape(node.attr["shape"].shape)
    is_whole = shape.is_fully_defined()
    return (
        tf.as_dtype(node.attr["dtype"].type),
        tuple(int(size) for size in shape.as_list()) if is_whole else None,
    )


def byte_size(op: Operation | ProtocolBuffer) -> int:
    """The bytes of the variable that ``op`` creates; 0 if its shape is unknown."""
    dtype, shape = dtype_and_shape(op)
    if dtype is None or shape is None:
        return 0
    return math.prod(shape) * int(dtype.size)


class ByBytes:
    """For ``replica_device_setter(ps_strategy=...)``: the ps with the fewest bytes.

    It follows ``tf.contrib.training.GreedyLoadBalancingStrategy`` of TensorFlow 1.
    ``size`` returns the bytes of an op's variable. Ties go to the ps with the fewest
    variables, so variables of unknown size are spread round-robin. Raises ValueError
    for fewer than one ps.
    """

    def __init__(
        self, num_ps: int, size: Callable[[Operation], int] = byte_size
    ) -> None:
        if num_ps < 1:
            raise ValueError(f"variables need a parameter server, not {num_ps}")
        self._size = size
        self._bytes = [0] * num_ps
        self._counts = [0] * num_ps
        self._largest = ("", 0)

    def __call__(self, op: Operation) -> int:
        """Choose a ps for the variable that ``op`` creates; return the ps's index."""
        size = self._size(op)
        task = least(self._bytes, self._counts)
        self._bytes[task] += size
        self._counts[task] += 1
        if size > self._largest[1]:
            self._largest = (str(op.name), size)
        return task

    @property
    def bytes_held(self) -> tuple[int, ...]:
        """Bytes by ps task."""
        return tuple(self._bytes)

    @property
    def warning(self) -> str | None:
        """A warning if one variable is larger than a parameter server's share."""
        return imbalance(self._largest[0], self._largest[1], self._bytes)


def least(bytes_held: Sequence[int], counts: Sequence[int]) -> int:
    """The task with the fewest bytes and, among equals, the fewest variables."""
    return min(
        range(len(bytes_held)), key=lambda task: (bytes_held[task], counts[task], task)
    )


def imbalance(name: str, size: int, bytes_held: Sequence[int]) -> str | None:
    """A warning if a variable is larger than a server's share, else None."""
    total, servers = sum(bytes_held), len(bytes_held)
    if size < _MIN_SAID_BYTES or size * servers <= total * _SHARE_SLACK:
        return None
    return (
        f"variable {name} has {size / total:.0%} of all bytes, more than the share of "
        f"one of {servers} parameter servers: they hold "
        f"{', '.join(f'{held / 2**20:.0f} MiB' for held in bytes_held)}. To divide it, "
        f"pass partitioner=tf.compat.v1.fixed_size_partitioner({servers}) to its "
        "get_variable or variable_scope"
    )


tf1 = tf.compat.v1

Gradients: TypeAlias = list[tuple[Gradient, Variable]]
"""Pairs of a gradient and its variable."""


def device_of(worker: str, tower: str) -> str:
    """``/job:worker/task:1/device:GPU:0`` for ``gpu:0``; else raises ValueError."""
    kind, _, number = tower.strip("/").removeprefix("device:").partition(":")
    if kind.lower() not in ("cpu", "gpu") or not number.isdecimal():
        raise ValueError(f"a tower must be like 'cpu:0' or 'gpu:1'; found {tower!r}")
    return f"{worker}/device:{kind.upper()}:{number}"


def require_same(names: Sequence[Sequence[str]]) -> None:
    """Raise CollectiveMismatchError unless all towers have the same variables."""
    for tower, tower_names in enumerate(names):
        if text := differences(names[0], tower_names):
            raise CollectiveMismatchError(
                "the towers of this worker have different models; compared with tower "
                f"0, tower {tower} {text}"
            )


def differences(expected: Sequence[str], actual: Sequence[str]) -> str:
    """The names that are missing from ``actual`` and extra in it; empty if none."""
    missing = sorted(set(expected) - set(actual))
    extra = sorted(set(actual) - set(expected))
    parts = []
    if missing:
        parts.append(f"misses {', '.join(missing)}")
    if extra:
        parts.append(f"also has {', '.join(extra)}")
    return " and ".join(parts)


def mean_gradients(towers: Sequence[Gradients], device: str) -> list[Gradient]:
    """The mean of each variable's gradients over the towers; None if no tower has one.

    Raises CollectiveMismatchError if only some towers have a gradient.
    """
    with tf1.device(device):
        return [
            _mean([gradient for gradient, _ in pairs], str(pairs[0][1].name))
            for pairs in zip(*towers, strict=True)
        ]


def mean_loss(losses: Sequence[Tensor], device: str) -> Tensor:
    """The mean of the towers' losses, tensors of one shape, computed on ``device``."""
    with tf1.device(device):
        return tf1.add_n(list(losses)) / len(losses)


def _mean(gradients: Sequence[Gradient], name: str) -> Gradient:
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return None
    if len(present) < len(gradients):
        raise CollectiveMismatchError(
            f"variable {name} has a gradient in some of this worker's towers only"
        )
    if len(present) == 1:
        return present[0]
    sparse = [gradient for gradient in present if is_sparse(gradient)]
    if len(sparse) == len(present):
        return tf.IndexedSlices(
            tf1.concat([gradient.values for gradient in sparse], 0) / len(sparse),
            tf1.concat([gradient.indices for gradient in sparse], 0),
            sparse[0].dense_shape,
        )
    return tf1.add_n([tf1.convert_to_tensor(g) for g in present]) / len(present)


_NEVER_STALE = tf.int64.max
"""Never drop a gradient as stale: the barriers ensure that none is late."""


Accumulator: TypeAlias = (
    "tf.compat.v1.ConditionalAccumulator | tf.compat.v1.SparseConditionalAccumulator"
)


def applied_mean(
    optimizer: V1Optimizer,
    pairs: Gradients,
    global_step: Variable,
    workers: Workers,
    barriers: Barriers,
) -> tuple[Operation, Tensor]:
    """The op that applies the workers' mean gradient, and whether any worker has left.

    Each worker adds its gradients to conditional accumulators on the parameter servers;
    the chief takes the means and applies them once, as in ``SyncReplicasOptimizer``. On
    workers other than the chief, the op only contributes gradients. After a worker
    has left, the mean is the mean of the remaining workers' gradients.
    """
    pairs = [
        (gradient, variable) for gradient, variable in pairs if gradient is not None
    ]
    accumulators = [
        _accumulator(gradient, variable, barriers.scope) for gradient, variable in pairs
    ]
    pushed = barriers.after(
        "gradients_pushed",
        [
            _pushed(accumulator, gradient, variable)
            for accumulator, (gradient, variable) in zip(
                accumulators, pairs, strict=True
            )
        ],
    )
    # All workers build this op, so that all have the same optimizer variables; only the
    # chief runs it.
    with tf1.control_dependencies([pushed.op]):
        means = [
            _taken(accumulator, gradient, variable)
            for accumulator, (gradient, variable) in zip(
                accumulators, pairs, strict=True
            )
        ]
        applied = optimizer.apply_gradients(
            zip(means, [variable for _, variable in pairs], strict=True),
            global_step=global_step,
        )
    return (applied if workers.is_chief else pushed.op), pushed.left


def _accumulator(gradient: Gradient, variable: Variable, scope: str) -> Accumulator:
    kind = (
        tf1.SparseConditionalAccumulator
        if isinstance(gradient, tf.IndexedSlices)
        else tf1.ConditionalAccumulator
    )
    with tf1.device(variable.device):
        return kind(
            variable.dtype.base_dtype,
            shape=variable.shape,
            shared_name=f"{variable.op.name}/mean/{scope}",
        )


def _pushed(
    accumulator: Accumulator, gradient: Gradient, variable: Variable
) -> Operation:
    with tf1.device(variable.device):
        if isinstance(gradient, tf.IndexedSlices):
            add = accumulator.apply_indexed_slices_grad
        else:
            add = accumulator.apply_grad
        pushed: Operation = add(gradient, local_step=_NEVER_STALE)
        return pushed


def _taken(
    accumulator: Accumulator, gradient: Gradient, variable: Variable
) -> Gradient:
    """The mean of all gradients received so far; after the barrier, of all workers."""
    with tf1.device(variable.device):
        if isinstance(gradient, tf.IndexedSlices):
            return accumulator.take_indexed_slices_grad(1)
        return accumulator.take_grad(1)


@dataclass(frozen=True, kw_only=True)
class Training:
    """``train_op`` is one step, including its last barrier.

    ``loss`` is a scalar of the dtype that the program's ``loss`` returns, and
    ``global_step`` is an int64 scalar variable.
    """

    train_op: Operation
    loss: Tensor
    """The mean over this worker's towers."""
    global_step: Variable
    barriers: int
    """The number of barriers in a step."""
    hook: SessionRunHook
    """For ``MonitoredTrainingSession(hooks=[...])``: see ``TrainingHook``."""
    sync_initial: Operation | None = None
    """Sets this worker's copies to the values on the parameter servers."""
    sync_model_variables: Operation | None = None
    """Copies the chief's non-trainable variables to the parameter servers. None on
    other workers, and if there are no such variables."""
    bytes_held: tuple[int, ...] = ()
    """The bytes of the placed variables by ps task, without the optimizer's slots."""
    masters: tuple[Variable, ...] = field(default=(), repr=False)
    """The variables on the parameter servers."""


class TrainingHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]  # untyped
    """Makes workers start with the same weights and end in the same step.

    When a worker ends, the others end after their next step. The worker's last tokens
    let them finish that step, so no worker waits for it.
    """

    def __init__(
        self, *, left: Tensor, departure: Operation, initial: Operation | None = None
    ) -> None:
        super().__init__()
        self._left = left
        self._departure = departure
        self._initial = initial

    def after_create_session(self, session: V1Session, coord: Coordinator) -> None:
        if self._initial is not None:
            session.run(self._initial)

    def after_run(self, run_context: SessionRunContext, run_values: object) -> None:
        # In a separate call: in the same call it could be read before it is written.
        if run_context.session.run(self._left):
            run_context.request_stop()

    def end(self, session: V1Session) -> None:
        session.run(self._departure)


def departure_flag(left: Tensor, device: str) -> tuple[Tensor, Operation]:
    """The value of a local variable that records ``left``, and the op that sets it.

    ``left`` is a boolean scalar that says whether a worker has left.
    """
    with tf1.device(device):
        variable = tf1.get_variable(
            "tfcluster/left",
            initializer=False,
            trainable=False,
            use_resource=True,
            collections=[tf1.GraphKeys.LOCAL_VARIABLES],
        )
        return variable.read_value(), variable.assign(left).op


class GraphBuilder:
    """Places variables on the parameter servers and applies the towers' gradients."""

    def __init__(
        self,
        optimizer: V1Optimizer,
        workers: Workers | None,
        towers: Sequence[str],
        name: str,
    ) -> None:
        self._optimizer = optimizer
        self.workers = workers or all_workers()
        self.cpu = device_of(self.workers.device, "cpu:0")
        self.towers = [device_of(self.workers.device, tower) for tower in towers]
        """The device of each tower."""
        self.barriers = Barriers(self.workers, name)
        self._placed = ByBytes(len(self.workers.ps_devices))
        with tf1.device(self.setter(self.cpu)):
            self._global_step = tf1.train.get_or_create_global_step()

    def setter(self, device: str) -> Callable[[Operation], str]:
        """Put variables on the parameter servers and everything else on ``device``."""
        return tf1.train.replica_device_setter(
            cluster=tf1.train.ClusterSpec(
                {
                    job: list(addresses)
                    for job, addresses in self.workers.cluster.items()
                }
            ),
            worker_device=device,
            ps_strategy=self._placed,
        )

    def applied(
        self, towers: Sequence[Gradients], variables: Sequence[Variable], *, mean: bool
    ) -> tuple[Operation, Tensor]:
        """The op that applies the mean gradient of ``towers`` to ``variables``.

        With ``mean`` it is the mean over all workers. Also returns a tensor that says
        whether any worker has left.
        """
        gradients = mean_gradients(towers, self.cpu)
        pairs = list(zip(gradients, variables, strict=True))
        if mean:
            return applied_mean(
                self._optimizer, pairs, self._global_step, self.workers, self.barriers
            )
        applied = self._optimizer.apply_gradients(pairs, global_step=self._global_step)
        return applied, tf1.constant(False)

    def training(
        self,
        last: Operation,
        left: Tensor,
        losses: Sequence[Tensor],
        variables: Sequence[Variable],
        *,
        initial: Operation | None = None,
        model_variables: Operation | None = None,
    ) -> Training:
        """The finished graph. A step ends with the op ``last``.

        ``left`` is a tensor that says whether any worker has left. ``variables`` are
        the variables on the parameter servers. ``initial`` and ``model_variables`` are
        the ops for ``Training.sync_initial`` and ``Training.sync_model_variables``.
        """
        with tf1.device(self.setter(self.cpu)):
            any_left, set_flag = departure_flag(left, self.cpu)
        session_manager.guard(self.workers)
        departure = self.barriers.departure()
        return Training(
            train_op=tf1.group(last, set_flag, name="train_op"),
            loss=mean_loss(losses, self.cpu),
            global_step=self._global_step,
            barriers=len(self.barriers),
            hook=TrainingHook(left=any_left, departure=departure, initial=initial),
            sync_initial=initial,
            sync_model_variables=model_variables,
            bytes_held=self._placed.bytes_held,
            masters=tuple(variables),
        )
