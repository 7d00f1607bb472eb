"""What programs call to be told about whole batches, which every step sees anyway.

Both functions are for programs that were written for ranks which compute their own rows
of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from tfcluster.runtime.exchange.graph_ops import require_numbers
from tfcluster.runtime.tensor_types import TensorLike

_RULES: tuple[object, ...] = (max, min, sum, "max", "mean", "min", "sum")

_C = TypeVar("_C", bound=type)

Rule = Callable[..., Any] | str


def merge_with(rule: Rule | None = None, /, **rules: Rule) -> Callable[[_C], _C]:
    """Declare how values of a metric's variables would be combined; it has no effect.

    A metric's update gets the whole batch, so its values need not be combined::

        @tfc.merge_with(max)
        class Largest(keras.metrics.Metric): ...

        @tfc.merge_with(sum, largest=max)
        class Both(keras.metrics.Metric): ...

    Returns a decorator that returns the class. ``rule`` is for all variables, and
    keywords are for the variables of these names. Each is ``max``, ``min``, ``sum``, or
    one of "max", "min", "sum", "mean". Raises ValueError for another rule.
    """
    for given in (*rules.values(), *(() if rule is None else (rule,))):
        if given not in _RULES:
            raise ValueError(
                "merge_with takes max, min, sum, or one of 'max', 'mean', 'min', "
                f"'sum', not {given!r}"
            )
    return lambda cls: cls


def gather_batch(*tensors: TensorLike) -> Any:
    """The tensors, unchanged: a step computes the whole batch.

    Each is a tensor, or what becomes one, of at least one dimension; ``allreduce``
    lists the supported dtypes. Returns a tensor, or a tuple if several are given.
    Raises TypeError for strings and ValueError for scalars.
    """
    found = [tf.convert_to_tensor(tensor) for tensor in tensors]
    for tensor in found:
        require_numbers(tensor.dtype, "gather_batch")
        if tensor.shape.rank == 0:
            raise ValueError("gather_batch takes tensors of at least one dimension")
    return found[0] if len(found) == 1 else tuple(found)
