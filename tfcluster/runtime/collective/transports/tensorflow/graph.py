"""Collective ops in the graph of a step, and this rank's progress in them.

No Python runs in such a step. So the graph itself counts, in variables on the CPU, the
ops that it has begun and ended; other threads read these variables. The ops of one
``OrderedOps`` run in the order in which they were written, which NCCL needs: like the
ops of ``MultiWorkerMirroredStrategy``, they share a resource, the ordering token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import tensorflow as tf

from tfcluster.runtime import tf_internals
from tfcluster.runtime.collective.transports.base import ReduceOp
from tfcluster.runtime.collective.transports.tensorflow import ops
from tfcluster.runtime.collective.transports.tensorflow.collective_keys import (
    NAMED_KEYS,
    instance_key,
)
from tfcluster.runtime.tensor_types import DType, Tensor, Variable

SCOPE = "tfcluster_exchange"
"""The name scope of the ops, by which TensorFlow's error messages are recognised."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of devices of the ops."""

    large: ops.Devices
    """For gradients: GPUs if every rank has its own, else CPUs."""
    cpus: ops.Devices
    """For the data on CPUs: row counts, digests, indices."""


class OrderedOps:
    """Collective ops that run in the order in which they were written."""

    def __init__(self, devices: ops.Devices) -> None:
        self.devices = devices
        self._token = _variable(0.0, tf.float32, devices.own)
        self._begun = counter()
        self._ended = counter()

    def all_reduce(
        self, tensor: Tensor, words: Iterable[object], ready: Tensor
    ) -> Tensor:
        """The sum of the ranks' tensors; ``words`` identify it on all ranks.

        ``tensor`` has one shape and dtype on all ranks: float32, float64, int32 or
        int64. The result has the same. Once ``ready`` has a value, this rank counts as
        waiting for the others.
        """

        def reduce() -> Tensor:
            return ops.all_reduce(
                tensor,
                self.devices,
                instance_key(words),
                ReduceOp.SUM,
                ordering_token=[self._token.handle],
            )

        return self._counted(reduce, ready)

    def rounded_sum(
        self,
        tensor: Tensor,
        factors: Tensor,
        place: Tensor,
        half: DType,
        words: Iterable[object],
    ) -> Tensor:
        """The sum of the ranks' vectors times their factors, sent in two bytes.

        ``tensor`` is a float32 vector with the same length on all ranks; so is the
        result. ``half`` is float16 or bfloat16. ``factors`` (float32) has the factors
        of all ranks in TensorFlow's order, in which this rank has the index ``place``.
        A factor of 0 leaves the rank's vector out, even if it is not finite. As in
        ``rounded_exchange``, each rank sums one part in float32, and rounds the sum
        once; its own values are not rounded before.
        """
        size = self.devices.size
        with tf.device(self.devices.own):
            count = tf.size(tensor) if tensor.shape[0] is None else tensor.shape[0]
            length = -(-count // size)
            padded = tf.pad(tensor, [[0, length * size - count]])
            own = tf.reshape(padded, [size, length])
            # Not all of these ops support bfloat16, and none interprets the values.
            sent = tf.bitcast(tf.cast(own, half), tf.float16)

            def exchange() -> Tensor:
                return ops.all_to_all(
                    sent,
                    self.devices,
                    instance_key((*words, "parts")),
                    ordering_token=[self._token.handle],
                )

            parts = tf.cast(tf.bitcast(self._counted(exchange, sent), half), tf.float32)
            column = tf.reshape(factors, [size, 1])
            others = tf.one_hot(place, size, 0.0, 1.0, dtype=tf.float32)[:, None]
            total = tf.reduce_sum(
                tf.math.multiply_no_nan(parts, column * others), 0
            ) + tf.math.multiply_no_nan(own[place], factors[place])
            rounded = tf.bitcast(tf.cast(total, half), tf.float16)
            gathered = self.all_gather(rounded, (*words, "sums"), rounded)
            return tf.cast(tf.bitcast(gathered, half), tf.float32)[:count]

    def all_gather(
        self,
        tensor: Tensor,
        words: Iterable[object],
        ready: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """The ranks' tensors, shape (rows, ...), concatenated in TensorFlow's order.

        Shapes, dtypes and ``ready`` are as for ``all_reduce``. Without ``ready``, this
        rank never counts as waiting in this op. ``rows``, an int64 scalar, is needed if
        it differs between steps: TensorFlow remembers the shape for each key.
        """
        key = instance_key(words)

        def gather() -> Tensor:
            return ops.all_gather(
                tensor,
                self.devices,
                key if rows is None else _key_for(key, rows),
                ordering_token=[self._token.handle],
            )

        return gather() if ready is None else self._counted(gather, ready)

    def counts(self) -> tuple[int, int]:
        """The numbers of ops that this rank has begun and ended; for any thread."""
        # In the other order, an op that ends meanwhile could count as ended only.
        ended = int(self._ended.numpy())
        return int(self._begun.numpy()), ended

    def _counted(self, act: Callable[[], Tensor], ready: Tensor) -> Tensor:
        with tf.control_dependencies([ready]):
            begun = increment(self._begun)
        with tf.control_dependencies([begun]):
            found = act()
        with tf.control_dependencies([found]):
            increment(self._ended)
        return found


class GraphCollectives:
    """The ops of this process; created once, when the groups are known."""

    def __init__(self, groups: Groups, rank: int) -> None:
        self.size = groups.cpus.size
        self.rank = rank
        self.contexts = OrderedOps(groups.cpus)
        """For the data that ranks compare before each exchange of gradients."""
        self.buckets = OrderedOps(groups.large)
        """For gradients; if NCCL reduces them, NCCL does nothing else."""
        on_gpus = groups.large.hint == ops.NCCL
        self.forward = self.buckets if on_gpus else OrderedOps(groups.cpus)
        """For the layers' reductions. On CPUs these do not delay the buckets."""

    def counts(self) -> tuple[tuple[int, int], ...]:
        """The counts of each kind of ops; see ``OrderedOps.counts``."""
        # Not built with a generator: Python's collector may see half of such a tuple.
        return self.contexts.counts(), self.buckets.counts(), self.forward.counts()


def counter() -> Variable:
    """A new variable that counts, a scalar of dtype int64 on the CPU."""
    return _variable(0, tf.int64, "CPU:0")


def real() -> Variable:
    """A new variable for a number, a scalar of dtype float64 on the CPU."""
    return _variable(0.0, tf.float64, "CPU:0")


def vector(dtype: tf.DType) -> Variable:
    """A new variable for vectors of any length, on the CPU; empty at first."""
    plain = tf.variable_creator_scope(tf_internals.plain_variable)
    with tf.init_scope(), plain, tf.device("CPU:0"):
        found: Variable = tf.Variable(
            tf.zeros([0], dtype), trainable=False, dtype=dtype, shape=[None]
        )
    return found


def assign(variable: Variable, value: Tensor) -> object:
    """Set one of these variables, as ``increment`` does."""
    return tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def increment(variable: Variable, by: Tensor | None = None) -> object:
    """Add ``by`` (an int64 scalar, 1 by default) to a counter; return the op.

    Does not use ``assign_add``, which a ``tf.custom_gradient`` would watch.
    """
    with tf.device("CPU:0"):
        value = tf.constant(1, tf.int64) if by is None else by
        return tf.raw_ops.AssignAddVariableOp(resource=variable.handle, value=value)


def rounded_up(rows: Tensor) -> Tensor:
    """Round up ``rows``, a positive int64 scalar, by at most an eighth.

    There are only eight results for each power of two, and therefore few keys.
    """
    exponent = tf.math.log(tf.cast(rows, tf.float64)) / tf.constant(
        math.log(2.0), tf.float64
    )
    step = tf.cast(2.0 ** tf.maximum(tf.floor(exponent) - 3.0, 0.0), tf.int64)
    return (rows + step - 1) // step * step


def _key_for(key: int, rows: Tensor) -> Tensor:
    """The key of an op whose base key is ``key``, for tensors with ``rows`` rows."""
    spread = rows * 2654435761  # Knuth's multiplicative hash.
    place = (spread + (key - NAMED_KEYS.start)) % len(NAMED_KEYS)
    return tf.cast(place + NAMED_KEYS.start, tf.int32)


def _variable(value: float, dtype: tf.DType, device: str) -> Variable:
    plain = tf.variable_creator_scope(tf_internals.plain_variable)
    with tf.init_scope(), plain, tf.device(device):
        found: Variable = tf.Variable(value, trainable=False, dtype=dtype)
    return found
