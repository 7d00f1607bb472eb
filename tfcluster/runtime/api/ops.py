"""Exchanges as ops of TensorFlow. Knows nothing of what is exchanged.

Eagerly they are calls. In a ``tf.function`` they are stateful ops, which TensorFlow
keeps in the order in which they were written. In a graph of TensorFlow 1 ops have no
order: there the ranks agree on one while it runs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective.group import Group
from tfcluster.runtime.collective.ordering import Order
from tfcluster.runtime.collective.transport import Array
from tfcluster.runtime.tensors import array_of, as_tensor, tensor_of
from tfcluster.runtime.world import exchanged, group, is_initialized

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

_numbers = itertools.count()
_order: Order | None = None
_order_of: Group | None = None


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
    *,
    combines: bool = True,
) -> list[Any]:
    """The tensors that ``exchange`` returns, given those of ``tensors`` as arrays.

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
    key = f"exchange op {next(_numbers)}"

    def in_turn(*arrays: Array) -> Sequence[Array]:
        results: Sequence[Array] = _common_order().run(key, lambda: act(*arrays))
        return results

    return _outputs(in_turn, tensors, dtypes)


def may_be_differentiated() -> bool:
    """Whether what is called now may have to say later what its gradients are.

    Eagerly and without a tape it has not, and to be ready for it takes as long as
    exchanging a megabyte.
    """
    if not tf.executing_eagerly():
        return True
    try:
        # Not public. Where it is gone, one is always ready.
        from tensorflow.python.eager import record
    except ImportError:
        return True
    return bool(getattr(record, "could_possibly_record", lambda: True)())


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


def _common_order() -> Order:
    global _order, _order_of
    ranks = group()
    if _order is None or _order_of is not ranks:
        _order, _order_of = Order(ranks), ranks
    return _order


@functools.cache
def raise_our_errors() -> None:
    """Have every ``tf.function`` raise the error of an exchange in it as it is.

    TensorFlow itself makes text of what an op in Python raises.
    """
    kind = type(tf.function(lambda: None))
    original = kind.__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with translated():
            return original(self, *args, **kwargs)

    kind.__call__ = call


@contextmanager
def translated() -> Iterator[None]:
    """Raise the error of an exchange where TensorFlow has made text of it."""
    try:
        yield
    except tf.errors.OpError as error:
        found = group().failure or group().refusal if is_initialized() else None
        if found is None:
            raise
        raise found from error


# Before any tf.function is called that has an exchange in it: a call that has begun is
# not changed any more.
raise_our_errors()
