"""Keeps the exchanges of a graph in program order.

TensorFlow runs two stateful ops of a graph in a fixed order only if both use the same
resource, or if neither uses any resource. A conditional or a loop uses the variables of
its branches. So an exchange inside it would have no fixed position among the other
exchanges, and ranks could begin different exchanges. Therefore each exchange reads one
common variable before it begins and writes it when it has ended. TensorFlow then orders
the exchanges, and everything that contains them, in the same way on all ranks.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias, overload

import numpy as np
import tensorflow as tf

from tfcluster.runtime import tf_internals
from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.exchange.graph_ops import call_with_arrays
from tfcluster.runtime.keras.tf_variables import new_variable
from tfcluster.runtime.tensor_types import DType, Operation, Tensor, Variable
from tfcluster.runtime.tensors import as_tensor

_Value: TypeAlias = Array | np.generic


@overload
def exchange_in_order(
    run: Callable[..., _Value], inputs: Sequence[Tensor], types: DType
) -> Tensor: ...


@overload
def exchange_in_order(
    run: Callable[..., Sequence[_Value]],
    inputs: Sequence[Tensor],
    types: Sequence[DType],
) -> list[Tensor]: ...


def exchange_in_order(
    run: Callable[..., _Value | Sequence[_Value]],
    inputs: Sequence[Tensor],
    types: DType | Sequence[DType],
) -> Tensor | list[Tensor]:
    """Like ``tf.numpy_function``, for a ``run`` that communicates with other ranks.

    ``run`` gets the inputs as arrays and returns arrays of dtypes ``types``: one, or a
    list. Returns tensors in the same form; their shapes are unknown in a graph. ``run``
    must not change its arguments, nor its results after it has returned: tensors may
    share their memory. Raises CollectiveError if XLA would compile the op, and what
    ``run`` raises. In a graph, the op raises a ``tf.errors.OpError`` with that error's
    text when it runs.
    """
    if tf.executing_eagerly():
        return _called(run, inputs, types)
    refuse_xla()
    outputs: Tensor | list[Tensor]
    with in_order() as done:
        outputs = tf.numpy_function(run, inputs, types)
        done += tf.nest.flatten(outputs)
    return outputs


@contextmanager
def in_order() -> Iterator[list[Tensor | Operation]]:
    """Keep the ops that the caller adds to a graph in order with its exchanges.

    The exchanges that the program added earlier end before these ops begin. The next
    exchanges begin once the ops that the caller has put into the list have run.
    """
    order = _variable()
    done: list[Tensor | Operation] = []
    with tf.control_dependencies([order.read_value()]):
        yield done
    with tf.control_dependencies(done):
        order.assign(False, read_value=False)


def _called(
    run: Callable[..., _Value | Sequence[_Value]],
    inputs: Sequence[Tensor],
    types: DType | Sequence[DType],
) -> Tensor | list[Tensor]:
    def act(*arrays: Array) -> list[Array]:
        return [np.asarray(array) for array in tf.nest.flatten(run(*arrays))]

    dtypes = [tf.as_dtype(dtype) for dtype in tf.nest.flatten(types)]
    found = call_with_arrays(act, [as_tensor(each) for each in inputs], dtypes)
    return found if isinstance(types, list | tuple) else found[0]


_refused = threading.local()
"""Set per thread, because AutoGraph replaces the exception with its own."""


def refuse_xla() -> None:
    """Raise CollectiveError if the graph being traced is to be compiled by XLA."""
    graph = tf.compat.v1.get_default_graph
    if not tf.executing_eagerly() and tf_internals.is_in_xla(graph()):
        _refused.lately = True
        raise CollectiveError("XLA cannot compile an exchange of gradients")


def take_refusal() -> bool:
    """Whether ``refuse_xla`` has raised since the last call of this function."""
    lately = getattr(_refused, "lately", False)
    _refused.lately = False
    return lately


@functools.cache
def _variable() -> Variable:
    """One variable per process: functions that call each other must share it."""
    with tf.device("CPU:0"):
        return new_variable(False, name="exchange_order")
