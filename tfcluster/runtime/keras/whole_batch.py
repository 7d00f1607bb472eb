"""Finds losses of the program's own that are no mean over the rows of a batch.

A function that returns one number for a batch does not say how it came by it. So the
first batch is looked at in two halves: of a mean over rows, the halves have it as their
mean; a sum is refused, and what is neither gets a warning.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.keras.rows import has_dense_rows, rows_in
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.wrapping import wrap

_TOLERANCE = 0.02
"""Relative; wide enough for half precision, and the mean and the sum are far apart."""


class Judged:
    """Of which objects everything is known already, for graphs to look at."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], tf.Variable]] = {}

    def of(self, judged: Any) -> tf.Variable:
        """A boolean, False at first."""
        entry = self._known.get(id(judged))
        if entry is None or entry[0]() is not judged:
            with tf.init_scope():
                variable = tf.Variable(False, trainable=False)
            entry = self._known[id(judged)] = weakref.ref(judged), variable
        return entry[1]


class WholeBatch:
    """The hook on ``Loss.__call__``."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._local = threading.local()
        self._judged = Judged()

    def install(self) -> None:
        wrap(keras.losses.Loss, "__call__", self._call)

    def returned(self, values: Any) -> None:
        """The loss that is being called has returned one number for its batch."""
        self._local.number = values

    def _call(
        self,
        original: Callable[..., Any],
        loss: Any,
        y_true: Any,
        y_pred: Any,
        sample_weight: Any = None,
    ) -> Any:
        self._local.number = None
        result = original(loss, y_true, y_pred, sample_weight)
        number = self._local.number
        if number is None or self._session.share is None:
            return result
        if all(map(has_dense_rows, keras.tree.flatten([y_true, y_pred]))):
            self._look(loss, y_true, y_pred, number)
        return result

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _look(self, loss: Any, y_true: Any, y_pred: Any, number: Any) -> None:
        rows = tf.cast(rows_in(keras.tree.flatten(y_pred)[0]), tf.int64)
        half = rows // 2
        known = self._judged.of(loss)

        def part(start: Any, stop: Any) -> Any:
            def cut(tensor: Any) -> Any:
                return tf.convert_to_tensor(tensor)[start:stop]

            true = keras.tree.map_structure(cut, y_true)
            pred = keras.tree.map_structure(cut, y_pred)
            true = keras.tree.map_structure(lambda t: tf.cast(t, loss.dtype), true)
            pred = keras.tree.map_structure(lambda t: tf.cast(t, loss.dtype), pred)
            return tf.cast(tf.stop_gradient(loss.call(true, pred)), tf.float64)

        def look() -> Any:
            numbers = [part(0, half), part(half, rows)]
            whole = tf.cast(tf.stop_gradient(number), tf.float64)
            seen = tf.numpy_function(judge, [whole, *numbers, rows], tf.bool)
            return known.assign(tf.reshape(seen, []), read_value=False)

        def judge(whole: float, first: float, second: float, rows: int) -> Any:
            return self._judge(loss.name, whole, (first, second), int(rows))

        tf.cond(
            tf.logical_or(known, rows < 2), lambda: tf.no_op(), lambda: tf.group(look())
        )

    def _judge(
        self, name: str, whole: float, halves: tuple[float, float], rows: int
    ) -> bool:
        """Whether that was all there is to know.

        Raises CollectiveError for a sum.
        """
        kind = kind_of_loss(whole, halves, rows)
        if kind == "sum":
            self._session.group.refusal = CollectiveError(
                f"the loss {name} returns the sum over the rows of a batch: a function "
                "has to return their mean, or one number for each row (a keras.Loss "
                "may have reduction='sum')"
            )
            raise self._session.group.refusal
        if kind == "whole batch":
            self._session.warn(
                f"the loss {name} is no mean over the rows of a batch: it sees the "
                "rows of one rank at a time, so the result differs from that of one "
                "machine"
            )
        return kind != "unknown"


def kind_of_loss(whole: float, halves: tuple[float, float], rows: int) -> str:
    """What a loss is by its values for a batch, and for the two halves of its rows.

    The first half has ``rows // 2`` of them. 'mean', 'sum', 'whole batch' or 'unknown'.
    """
    first, second = halves
    size = max(map(abs, (whole, *halves)))
    if rows < 2 or not 0.0 < size < float("inf"):
        return "unknown"
    half = rows // 2
    mean = (half * first + (rows - half) * second) / rows
    if abs(whole - mean) <= _TOLERANCE * size:
        return "mean"
    if abs(whole - (first + second)) <= _TOLERANCE * size:
        return "sum"
    return "whole batch"
