"""Runs exchanges as TensorFlow ops. Does not know what is exchanged.

In eager mode an exchange is a plain call. In a ``tf.function`` it is a stateful op, and
TensorFlow runs stateful ops in program order. A TensorFlow 1 graph does not order its
ops, so the ranks negotiate an order while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import numpy as np
import tensorflow as tf

from tfcluster.runtime import tf_internals
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.exchange.pending_ops import waiting_op
from tfcluster.runtime.process_group import exchanged
from tfcluster.runtime.process_sets import ProcessSet, global_process_set
from tfcluster.runtime.tensor_types import DType, Gradient, Tensor
from tfcluster.runtime.tensors import array_of, as_tensor, is_inexact, tensor_of

NUMBERS = frozenset(
    (
        *(tf.float16, tf.bfloat16, tf.float32, tf.float64),
        *(tf.int8, tf.int16, tf.int32, tf.int64),
        *(tf.uint8, tf.uint16, tf.uint32, tf.uint64),
        *(tf.complex64, tf.complex128, tf.bool),
    )
)
"""The dtypes that can be exchanged."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


OP_NAME = "tfcluster_exchange"
"""The beginning of the names of ops that exchange data for the program."""


def unconverted(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keep AutoGraph from converting a function that a ``tf.function`` calls."""
    return tf.autograph.experimental.do_not_convert(function)


def require_numbers(dtype: DType, what: str) -> None:
    """Raise TypeError unless a tensor of ``dtype`` holds numbers or booleans."""
    if dtype not in NUMBERS:
        raise TypeError(f"{what} takes numbers, not {dtype.name}")


def exchange_op(
    exchange: Callable[..., Sequence[Array]],
    tensors: Sequence[Tensor],
    dtypes: Sequence[tf.DType],
    what: str,
    among: ProcessSet = global_process_set,
    *,
    combines: bool = True,
) -> list[Tensor]:
    """The results of ``exchange``, which is called with the tensors as numpy arrays.

    ``what`` names the operation in messages, such as ``allreduce of weights``. In a
    TensorFlow 1 graph, ranks match their ops by this text, or by the name in it.
    ``dtypes`` are the dtypes of the results; a graph does not know their shapes.
    ``combines`` says that the results depend on the data of every rank. Raises what
    ``exchange`` raises, in a graph when the op runs, and at once what ``require_added``
    of ``among`` raises.
    """
    among.require_added()

    def act(*arrays: Array) -> Sequence[Array]:
        results = exchange(*arrays)
        exchanged(combined=combines)
        return results

    tensors = [as_tensor(tensor) for tensor in tensors]
    if tf.executing_eagerly():
        return call_with_arrays(act, tensors, dtypes)
    if tf.compat.v1.executing_eagerly_outside_functions():
        return _outputs(act, tensors, dtypes)
    return waiting_op(act, tensors, dtypes, what, among)


def may_be_differentiated() -> bool:
    """Whether a gradient of the current call may be needed later.

    False in eager mode without a tape, where recording a gradient would take as long as
    exchanging a megabyte.
    """
    if not tf.executing_eagerly():
        return True
    return tf_internals.could_record()


def with_gradients(
    forward: Callable[..., tuple[list[Tensor], Callable[..., list[Gradient]]]],
    tensors: Sequence[Tensor],
) -> list[Tensor]:
    """The results of ``forward(*tensors)``, with their gradients.

    ``forward`` also returns the function that computes these; see
    ``tf.custom_gradient``.
    """
    if not (may_be_differentiated() and any(map(is_inexact, tensors))):
        return forward(*tensors)[0]
    return list(tf.nest.flatten(tf.custom_gradient(forward)(*tensors)))


def call_with_arrays(
    act: Callable[..., Sequence[Array]],
    tensors: Sequence[Tensor],
    dtypes: Sequence[tf.DType],
) -> list[Tensor]:
    """Call ``act`` with eager tensors as arrays; return its results as tensors.

    Arguments and results are not copied if TensorFlow allows it. So ``act`` must not
    change its arguments, nor its results after it has returned.
    """
    # Not numpy_function: it copies, and fails on scalars of bfloat16.
    arrays = act(*(array_of(tensor) for tensor in tensors))
    return [tensor_of(*pair) for pair in zip(arrays, dtypes, strict=True)]


def _outputs(
    act: Callable[..., Sequence[Array]],
    tensors: list[Tensor],
    dtypes: Sequence[tf.DType],
) -> list[Tensor]:
    def run(*arrays: Array) -> list[Array]:
        return [np.asarray(array) for array in act(*arrays)]

    return list(tf.numpy_function(run, tensors, list(dtypes), name=OP_NAME))
