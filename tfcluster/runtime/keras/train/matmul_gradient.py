"""A faster gradient of a matrix product that has few rows and a large matrix.

TensorFlow computes the gradient of the rows ``x`` of ``x @ w`` as ``g @ w.T``. On a
CPU, Eigen then copies all of ``w`` column by column, which takes as long for 8 rows as
for 100: 45 ms for 2048 x 2048, where the product itself takes 3 ms. Ranks that divide a
batch have few rows each, and a step that computes shard by shard copies ``w`` once for
each shard. ``(w @ g.T).T`` has the same terms, and ``w`` is read as it is stored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol, TypeVar

import tensorflow as tf

from tfcluster.runtime import tf_internals, tf_patches
from tfcluster.runtime.tensor_types import Tensor

T = TypeVar("T")

_NUMBERS = 1 << 18
"""A matrix with at least this many numbers is large."""
_NARROW = 256
"""A matrix with fewer rows or columns is copied fast."""
_MANY_ROWS = 256
"""With at least this many rows, the copy does not matter."""


class Operation(Protocol):
    """A matrix product whose gradient is wanted."""

    inputs: tuple[Tensor, Tensor]

    def get_attr(self, name: str) -> Any: ...


Gradients = tuple[Tensor | None, Tensor | None]
"""The gradients of the rows and of the matrix."""
Original = Callable[[Operation, Tensor], Gradients]


class MatmulGradient:
    """Replaces TensorFlow's gradient of large matrices for few rows."""

    def __init__(self, *, unknown_are_few: bool = False) -> None:
        """With ``unknown_are_few``, an unknown number of rows in a graph counts as few.

        Otherwise the graph decides when it runs.
        """
        self._unknown_are_few = unknown_are_few
        self._local = threading.local()

    def install(self) -> None:
        """Install the hooks in TensorFlow."""
        tf_patches.TABLE.install(
            {
                tf_patches.GRADIENT_FUNCTIONS: self._lookup,
                tf_patches.TAPE_JACOBIAN: self._plain,
                tf_patches.TAPE_BATCH_JACOBIAN: self._plain,
            }
        )

    def _plain(self, original: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Compute a jacobian without a graph that decides when it runs.

        TensorFlow computes all rows of the jacobian at once, and would warn about the
        conditional.
        """
        before = getattr(self._local, "is_plain", False)
        self._local.is_plain = True
        try:
            return original(*args, **kwargs)
        finally:
            self._local.is_plain = before

    def _lookup(
        self, original: Callable[[object, str], Any], registry: object, kind: str
    ) -> Any:
        """The function that computes the gradients of a kind of operation."""
        found = original(registry, kind)
        if kind == "MatMul" and tf_internals.is_of_gradients(registry):
            return partial(self._gradients, found)
        return found

    def _gradients(
        self, original: Original, product: Operation, gradient: Tensor
    ) -> Gradients:
        """The gradients of both inputs; one that is not needed is None."""
        skipped = getattr(product, "skip_input_indices", None) or ()
        few = self._is_slow(product)
        if 0 in skipped or few is False:
            return original(product, gradient)
        rows, matrix = product.inputs

        def fast() -> Tensor:
            return tf.transpose(tf.matmul(matrix, gradient, transpose_b=True))

        def slow() -> Tensor:
            return tf.matmul(gradient, matrix, transpose_b=True)

        of_rows = fast() if few is True else tf.cond(few, fast, slow)
        of_rows.set_shape(rows.shape)
        if 1 in skipped:
            return of_rows, None
        return of_rows, tf.matmul(rows, gradient, transpose_a=True)

    def _is_slow(self, product: Operation) -> bool | Tensor:
        """Whether TensorFlow's own gradient of the rows is slow.

        A graph knows the same shapes on all ranks.
        """
        rows, matrix = product.inputs
        height, width = matrix.shape
        if (
            product.get_attr("transpose_a")
            or product.get_attr("transpose_b")
            or matrix.dtype not in (tf.float32, tf.float64)
            or height is None
            or width is None
            or height * width < _NUMBERS
            or min(height, width) < _NARROW
            or _has_gpu()
        ):
            return False
        count = rows.shape[0]
        if count is not None:
            return bool(count < _MANY_ROWS)
        if self._unknown_are_few:
            return True
        if getattr(self._local, "is_plain", False):
            return False
        return tf.shape(rows)[0] < _MANY_ROWS


@cache
def _has_gpu() -> bool:
    """Whether TensorFlow has a GPU, which copies no matrix.

    It is asked when a step needs it: a program that does not train should not look for
    devices, which takes time and prints messages.
    """
    return bool(tf.config.list_physical_devices("GPU"))
