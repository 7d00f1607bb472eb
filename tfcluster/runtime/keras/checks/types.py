"""Types of TensorFlow's and Keras's objects that only the checks use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

from tfcluster.runtime.tensor_types import Nest, Tensor

TensorKey: TypeAlias = "int | str"
"""Identifies a tensor: the id of an eager tensor, the name of a graph's tensor."""

TrainFunction: TypeAlias = Callable[[Iterator[Nest]], Nest]
"""The type of ``make_train_function``'s result: it trains on an iterator's next batch,
and returns the logs of the step."""


class Loss(Protocol):
    """A ``keras.losses.Loss``."""

    name: str
    dtype: str

    def call(self, y_true: Nest, y_pred: Nest) -> Tensor:
        """The loss for each row, or a scalar, before the reduction."""
        ...
