"""A faster gradient of a matrix product that has few rows and a large matrix.

TensorFlow computes the gradient of the rows ``x`` of ``x @ w`` as ``g @ w.T``. On a
processor, Eigen then copies all of ``w`` column by column, which takes as long for 8
rows as for 100: 40 ms for 2048 x 2048, where the product itself takes 3 ms. A step that
computes shard by shard would pay for it once for each shard. ``(w @ g.T).T`` has the
same terms, and ``w`` is read as it is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import tensorflow as tf

from tfcluster.runtime import tf_internals, tf_patches
from tfcluster.runtime.tensor_types import Tensor

_NUMBERS = 1 << 18
"""From so many numbers on, a matrix is large."""
_NARROW = 256
"""A matrix with fewer rows or columns is copied fast."""
_MANY_ROWS = 256
"""From so many rows on, the copy does not matter."""


class Operation(Protocol):
    """A matrix product whose gradient is wanted."""

    inputs: tuple[Tensor, Tensor]

    def get_attr(self, name: str) -> Any: ...


Gradients = tuple[Tensor | None, Tensor | None]
"""Those of the rows and of the matrix."""
Original = Callable[[Operation, Tensor], Gradients]


def install() -> None:
    """Use the faster gradient in this process, unless TensorFlow has a GPU.

    On a GPU, no matrix is copied.
    """
    if not tf.config.list_physical_devices("GPU"):
        tf_patches.TABLE.install({tf_patches.GRADIENT_FUNCTIONS: faster})


def faster(original: Callable[[object, str], Any], registry: object, kind: str) -> Any:
    """The function that computes the gradients of a kind of operation."""
    found = original(registry, kind)
    if kind == "MatMul" and tf_internals.is_of_gradients(registry):
        return partial(_gradients, found)
    return found


def _gradients(original: Original, product: Operation, gradient: Tensor) -> Gradients:
    """The gradients of the two inputs, of which one may be None: it is not needed."""
    rows, matrix = product.inputs
    skipped = getattr(product, "skip_input_indices", None) or ()
    if 0 in skipped or not _is_slow(product, rows, matrix):
        return original(product, gradient)
    of_rows = tf.transpose(tf.matmul(matrix, gradient, transpose_b=True))
    if 1 in skipped:
        return of_rows, None
    return of_rows, tf.matmul(rows, gradient, transpose_a=True)


def _is_slow(product: Operation, rows: Tensor, matrix: Tensor) -> bool:
    """Whether TensorFlow's own gradient of ``rows`` is slow.

    What a graph knows of the shapes is the same on all ranks, and so is the answer.
    """
    height, width = matrix.shape
    count = rows.shape[0]
    return (
        not product.get_attr("transpose_a")
        and not product.get_attr("transpose_b")
        and matrix.dtype in (tf.float32, tf.float64)
        and height is not None
        and width is not None
        and height * width >= _NUMBERS
        and min(height, width) >= _NARROW
        and (count is None or count < _MANY_ROWS)
    )
