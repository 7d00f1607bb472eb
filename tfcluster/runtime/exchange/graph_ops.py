"""Exchanges as ops of TensorFlow. Knows nothing of what is exchanged.

Eagerly they are calls. In a ``tf.function`` they are stateful ops, which TensorFlow
keeps in the order in which they were written. In a graph of TensorFlow 1 ops have no
order: there the ranks agree on one while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tfcluster.runtime import tf_internals
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.exchange.error_translation import raise_our_errors
from tfcluster.runtime.exchange.pending_ops import waiting_op
from tfcluster.runtime.process_group import exchanged
from tfcluster.runtime.process_sets import ProcessSet, global_process_set
from tfcluster.runtime.tensors import array_of, as_tensor, tensor_of

NUMBERS = frozenset(
    (
        *(tf.float16, tf.bfloat16, tf.float32, tf.float64),
        *(tf.int8, tf.int16, tf.int32, tf.int64),
        *(tf.uint8, tf.uint16, tf.uint32, tf.uint64),
        *(tf.complex64, tf.complex128, tf.bool),
    )
)
"""The dtypes that can be exchanged."""

F = TypeVar("F", bound=Callable[..., Any])


def unconverted(function: F) -> F:
    """A function that autograph leaves as it is, called from a ``tf.function``."""
    return tf.autograph.experimental.do_not_convert(function)  # type: ignore[no-any-return]


def require_numbers(tensor: Any, what: str) -> None:
    """Raise TypeError for a tensor that is neither of numbers nor of booleans."""
    if tensor.dtype not in NUMBERS:
        raise TypeError(f"{what} takes numbers, not {tensor.dtype.name}")


def exchange_op(
    exchange: Callable[..., Sequence[Array]],
    tensors: Sequence[Any],
    dtypes: Sequence[Any],
    what: str,
    among: ProcessSet = global_process_set,
    *,
    combines: bool = True,
) -> list[Any]:
    """The tensors that ``exchange`` returns, given those of ``tensors`` as arrays.

    ``what`` is what messages call it, such as ``allreduce of weights``. In a graph of
    TensorFlow 1 ranks know by it, or by the name in it, which op is which.
    ``combines``: something of every rank is in them.
    """

    def act(*arrays: Array) -> Sequence[Array]:
        results = exchange(*arrays)
        exchanged(combined=combines)
        return results

    tensors = [as_tensor(tensor) for tensor in tensors]
    if tf.executing_eagerly():
        return _called(act, tensors, dtypes)
    raise_our_errors()
    if tf.compat.v1.executing_eagerly_outside_functions():
        return _outputs(act, tensors, dtypes)
    return waiting_op(act, tensors, dtypes, what, among)


def may_be_differentiated() -> bool:
    """Whether what is called now may have to say later what its gradients are.

    Eagerly and without a tape it has not, and to be ready for it takes as long as
    exchanging a megabyte.
    """
    if not tf.executing_eagerly():
        return True
    return tf_internals.could_record()


def _called(
    act: Callable[..., Sequence[Array]], tensors: list[Any], dtypes: Sequence[Any]
) -> list[Any]:
    # Not numpy_function: it fails on scalars of bfloat16.
    arrays = act(*(array_of(tensor) for tensor in tensors))
    return [tensor_of(*pair) for pair in zip(arrays, dtypes, strict=True)]


def _outputs(
    act: Callable[..., Sequence[Array]], tensors: list[Any], dtypes: Sequence[Any]
) -> list[Any]:
    def run(*arrays: Array) -> list[Array]:
        return [np.asarray(array) for array in act(*arrays)]

    return list(tf.numpy_function(run, tensors, list(dtypes)))
