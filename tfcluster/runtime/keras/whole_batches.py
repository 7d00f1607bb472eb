"""What programs call to be told about whole batches, which every step sees anyway.

Both functions have no effect. They are for programs that were written for ranks which
compute their own rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from tfcluster.runtime.tensor_types import TensorLike

_C = TypeVar("_C", bound=type)


def merge_with(rule: object = None, /, **rules: object) -> Callable[[_C], _C]:
    """Decorate a metric class, which stays as it is: its update gets the whole batch.

    ``rule`` and ``rules`` say how the ranks' values of its variables, or of those of
    these names, would be combined.
    """
    return lambda cls: cls


def gather_batch(*tensors: TensorLike) -> Any:
    """The tensors themselves: a tensor, or a tuple if several are given."""
    batch = tuple(map(tf.convert_to_tensor, tensors))
    return batch if batch[1:] else batch[0]
