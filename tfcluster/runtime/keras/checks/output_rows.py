"""Finds layers whose output for a row depends on the other rows of the batch.

A custom layer may, for example, divide by the largest value in the batch. A rank has
only some of the rows, so its largest value may differ. The method is tfcluster's own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras.batches.batch_slicing import (
    has_dense_rows,
    rows_in,
    slice_some,
)
from tfcluster.runtime.keras.checks.known_objects import KnownObjects
from tfcluster.runtime.keras.checks.loss_reduction import same_rows
from tfcluster.runtime.keras.checks.rounding import TOLERANCES
from tfcluster.runtime.keras.graph_order import exchange_in_order
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.types import Layer
from tfcluster.runtime.tensor_types import Nest, Tensor


class OutputsByRow:
    """Compares a layer's output for a batch with that for its two halves, once."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._judged = KnownObjects()

    def look(self, layer: Layer, outputs: Callable[[Nest], Nest], given: Nest) -> None:
        """Check ``layer``, whose arguments ``given`` have this rank's rows.

        ``outputs`` computes its outputs for arguments of the same structure. Warns when
        the step runs if the output for a row depends on other rows. Does nothing if no
        argument is a dense tensor with rows.
        """
        leaves = [leaf for leaf in tf.nest.flatten(given) if has_dense_rows(leaf)]
        if not leaves:
            return
        rows = tf.cast(rows_in(leaves[0]), tf.int64)
        known = self._judged.of(layer)

        def of_rows(start: int | Tensor, stop: int | Tensor) -> list[Tensor]:
            found = tf.nest.flatten(outputs(slice_some(given, leaves, start, stop)))
            return [tensor for tensor in found if tensor.dtype.is_floating]

        def judge(*arrays: Array) -> np.bool_:
            count = len(arrays) // 3
            for place in range(count):
                whole, *halves = arrays[place::count]
                tolerance = TOLERANCES.get(whole.dtype.name, max(TOLERANCES.values()))
                if not same_rows(whole, np.concatenate(halves), tolerance):
                    self._session.differs(
                        f"the output of the layer {layer.name} for a row depends on "
                        "the other rows of its batch. Each rank has only some of the "
                        "rows, so the result differs from that of one machine"
                    )
            return np.bool_(True)

        def look() -> Tensor:
            half = rows // 2
            parts = of_rows(0, rows), of_rows(0, half), of_rows(half, rows)
            arrays = [tensor for part in parts for tensor in part]
            # In order: if it raises, this rank has not begun the next exchange.
            seen = exchange_in_order(judge, arrays, tf.bool)
            return known.assign(tf.reshape(seen, []), read_value=False)

        tf.cond(known | (rows < 2), lambda: tf.no_op(), lambda: tf.group(look()))
