"""A share of a batch that graphs read when they run, not when they are traced.

A ``tf.function`` of a custom training loop is traced once. It then serves several
batches, of which this rank has different rows.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras.session import Share
from tfcluster.runtime.keras.tf_variables import new_variable
from tfcluster.runtime.tensor_types import Operation, Variable


class GraphShare:
    """Holds a ``Share`` whose fields are numbers, not tensors, and have no ``data``."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._variable: Variable | None = None

    def read(self) -> Share:
        """The share. In a graph its fields are scalars that are read when it runs."""
        if tf.executing_eagerly():
            return self._share
        numbers = tf.unstack(self._in_graphs().read_value())
        rows, counts, total, trial, uncounted, first, undivided = numbers
        return Share(
            rows=rows,
            counts=counts > 0,
            total=total,
            trial=trial > 0,
            uncounted=uncounted,
            first=first,
            undivided=undivided > 0,
        )

    def set(self, share: Share) -> None:
        """Change the share, also for graphs that are already traced."""
        if share != self._share and self._variable is not None:
            self._variable.assign(_numbers(share))
        self._share = share

    def mark(self) -> Operation:
        """Add an op to a graph that counts as a change of the share.

        Ops that read the share earlier in the program run before this op, and ops that
        read it later run after this op, also in functions that the graph calls.
        """
        variable = self._in_graphs()
        nothing = np.zeros_like(_numbers(self._share))
        added: Operation = variable.assign_add(nothing, read_value=False)
        return added

    def _in_graphs(self) -> Variable:
        if self._variable is None:
            self._variable = new_variable(_numbers(self._share), tf.float64)
        return self._variable


def _numbers(share: Share) -> Array:
    numbers = [
        share.rows,
        share.counts,
        share.total,
        share.trial,
        share.uncounted,
        share.first,
        share.undivided,
    ]
    return np.array(numbers, np.float64)
