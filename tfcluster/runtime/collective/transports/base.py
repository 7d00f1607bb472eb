"""What is reduced, and how. Knows no TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class ReduceOp(Enum):
    """How values of all ranks are reduced to one."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    ADASUM = "adasum"


UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}
"""The operations that transports know; averages are computed from sums."""


def flat_bytes(arrays: Sequence[Array]) -> bytes:
    """The arrays' bytes in C order, concatenated; any shapes and dtypes."""
    return b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)


@dataclass(frozen=True, slots=True)
class Slices:
    """A sparse gradient (``tf.IndexedSlices``, as of embeddings): rows of an array.

    ``values[i]`` belongs to row ``indices[i]``. ``values`` has shape (n, ...) and any
    dtype of numbers, ``indices`` shape (n,) and an integer dtype; an index may repeat.
    """

    values: Array
    indices: Array
    rows: int | None = None
    """The number of rows of the larger array; None if it is not known."""
