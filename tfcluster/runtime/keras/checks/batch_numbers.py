"""Finds out what kind of numbers a program reports for its batches.

The numbers go to the metrics ``Mean`` and ``Sum``, or to the logs that a step returns.

A number for a batch may be a mean over the rows (a loss), a sum over them (a count), or
the same for all batches. Its value does not show which, but its computation does: see
``row_degrees``.
"""

from __future__ import annotations

import tensorflow as tf

from tfcluster.runtime.keras.batches.batch_slicing import rows_in
from tfcluster.runtime.keras.checks.row_degrees import degree
from tfcluster.runtime.keras.checks.row_terms import RowTerms
from tfcluster.runtime.keras.object_map import ObjectMap
from tfcluster.runtime.keras.types import Metric
from tfcluster.runtime.tensor_types import Tensor


class BatchNumbers:
    """Remembers the kind of number that each metric gets."""

    def __init__(self, row_terms: RowTerms) -> None:
        self._row_terms = row_terms
        self._kinds = ObjectMap[str]()

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def kind(self, metric: Metric, number: Tensor) -> str:
        """The kind of ``number``, which ``metric`` gets: 'sum', 'mean' or 'unknown'.

        ``number`` is a scalar: a tensor or a Python number. Not every eager step is
        analysed. For the other steps, the last known kind is returned.
        """
        found = self.kind_of(number)
        if found is not None:
            self._kinds[metric] = found
            return found
        return self._kinds.get(metric) or "unknown"

    def look(self, number: Tensor, what: str) -> None:
        """Warn if ``number`` is neither a mean nor a sum; ``what`` describes it."""
        self._row_terms.look_at_report(number, what)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def kind_of(self, number: Tensor) -> str | None:
        """The kind of ``number``; None if this step is not analysed."""
        known = self._row_terms.known_ops(number)
        if known is None:
            return None
        ops, leaves = known
        counted = rows_in(leaves[0])
        rows = counted if isinstance(counted, int) else None
        if rows is not None and rows < 2:
            return None  # A mean over one row is its sum.
        try:
            grows = degree(ops, leaves, number, rows) if tf.is_tensor(number) else None
        except KeyError:
            value = tf.get_static_value(number)
            if value is None:
                return "unknown"
            return "sum" if value == rows else "mean"
        return {0.0: "mean", 1.0: "sum"}.get(grows, "unknown")  # type: ignore[arg-type]
