"""Places each variable on the parameter server that holds the fewest bytes.

The placement depends only on the order of creation, which is the same on every worker.
So all workers compute the same placement without communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfcluster.runtime.tensor_types import DType, Message, Operation

_SHARE_SLACK = 1.1
"""The promised balance: within a tenth of an even share."""

_MIN_SAID_BYTES = 1 << 20
"""Warn only about larger variables: smaller ones do not matter."""


def dtype_and_shape(
    op: Operation | Message,
) -> tuple[DType | None, tuple[int, ...] | None]:
    """A variable op's dtype and shape, each None if unknown.

    ``op`` is an operation or its ``NodeDef``.
    """
    node: Any = getattr(op, "node_def", op)
    if "dtype" not in node.attr or "shape" not in node.attr:
        return None, None
    shape = tf.TensorShape(node.attr["shape"].shape)
    known = shape.is_fully_defined()
    return (
        tf.as_dtype(node.attr["dtype"].type),
        tuple(int(size) for size in shape.as_list()) if known else None,
    )


def byte_size(op: Operation | Message) -> int:
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
