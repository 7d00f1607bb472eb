"""Finds out what the numbers are that a program gives to ``Mean`` and ``Sum``.

One number for a batch does not say whether it is a mean over the rows (a loss), a sum
over them (a count), or the same for all batches. The number is computed again for the
two halves of the rows, without the program's code.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime.keras.row_terms import Parts, RowTerms
from tfcluster.runtime.keras.whole_batch import kind_of_loss

_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class _Found:
    """Variables, as graphs read them; all are False at first."""

    metric: weakref.ref[Any]
    known: tf.Variable
    is_sum: tf.Variable
    is_mean: tf.Variable


class BatchNumbers:
    """What is known about the numbers that each metric gets."""

    def __init__(self, row_terms: RowTerms) -> None:
        self._row_terms = row_terms
        self._found: dict[int, _Found] = {}

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def kind(self, metric: Any, number: Any) -> tuple[Any, Any]:
        """Whether ``number``, which ``metric`` gets, is a sum over rows, or a mean.

        Two booleans or boolean tensors; both are False where that is not known.
        """
        found = self._of(metric)
        parts = None
        if tf.is_tensor(number):
            parts = self._row_terms.in_parts(number)
        if parts is not None:
            self._look(found, parts)
        return found.is_sum.read_value(), found.is_mean.read_value()

    def _look(self, found: _Found, parts: Parts) -> None:
        rows = parts.rows

        def judge(whole: Any, first: Any, second: Any, rows: Any) -> Any:
            halves = float(first), float(second)
            kind = kind_of_loss(float(whole), halves, int(rows), _TOLERANCE)
            if not parts.path and whole == rows:
                kind = "sum"  # The number of rows, known before the step runs.
            return np.array([kind != "unknown", kind == "sum", kind == "mean"])

        def look() -> Any:
            half = rows // 2
            halves = [parts.of_rows(0, half), parts.of_rows(half, rows)]
            numbers = [tf.cast(n, tf.float64) for n in (parts.number, *halves)]
            seen = tf.numpy_function(judge, [*numbers, rows], tf.bool)
            known, is_sum, is_mean = tf.unstack(tf.ensure_shape(seen, [3]))
            return tf.group(
                found.known.assign(known, read_value=False),
                found.is_sum.assign(is_sum, read_value=False),
                found.is_mean.assign(is_mean, read_value=False),
            )

        # The program may compute it for a constant number of rows.
        with contextlib.suppress(Exception):
            tf.cond(found.known | (rows < 2), lambda: tf.no_op(), look)

    def _of(self, metric: Any) -> _Found:
        found = self._found.get(id(metric))
        if found is None or found.metric() is not metric:
            with tf.init_scope():
                variables = [tf.Variable(False, trainable=False) for _ in range(3)]
            found = self._found[id(metric)] = _Found(weakref.ref(metric), *variables)
        return found
