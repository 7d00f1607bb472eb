"""Types of TensorFlow's and Keras's objects that only the checks use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

from tfcluster.runtime.tensor_types import Tensor

Leaf: TypeAlias = Any
"""An entry of a batch: a tensor, ragged or sparse tensor, an array, or another value.

The first dimension of a tensor or array is that of the rows.
"""

Nested: TypeAlias = Any
"""A leaf, or lists, tuples and dictionaries of leaves, as ``tf.nest`` knows them."""

TensorKey: TypeAlias = "int | str"
"""Identifies a tensor: the id of an eager tensor, the name of a graph's tensor."""

TrainFunction: TypeAlias = Callable[[Iterator[Nested]], Nested]
"""A result of ``make_train_function``: trains on an iterator's next batch.

Returns the logs of the step.
"""


class Loss(Protocol):
    """A ``keras.losses.Loss``."""

    name: str
    dtype: str

    def call(self, y_true: Nested, y_pred: Nested) -> Tensor:
        """The loss for each row, or a scalar, before the reduction."""
        ...
