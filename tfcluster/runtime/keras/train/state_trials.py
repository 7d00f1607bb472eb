"""Test an update of variables with other old values and with halves of the rows.

The results tell how the ranks' values must be combined; see ``state_updates``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras.batches.batch_slicing import cut, has_dense_rows, rows_in
from tfcluster.runtime.keras.checks.known_objects import KnownObjects
from tfcluster.runtime.keras.graph_order import exchange_in_order
from tfcluster.runtime.keras.train.state_updates import SHIFT, Trial

_MOST_VARIABLES = 8
"""The update is traced twice for each variable."""
_NUMBERS = 7
"""The number of arrays in a ``Trial``."""

Update = Callable[[Sequence[Any], Any], Sequence[Any]]
"""Computes new values of variables from old ones and the arguments of a call."""


class Trials:
    """Tests each update once, in the first step that has at least two rows."""

    def __init__(self) -> None:
        self._judged = KnownObjects()

    def known(self, owner: Any) -> Any:
        """A boolean tf.Variable: whether everything is known about ``owner``."""
        return self._judged.of(owner)

    def look(
        self,
        owner: Any,
        update: Update,
        current: Sequence[Any],
        places: Sequence[int],
        given: Any,
        judge: Callable[[Sequence[Trial]], Sequence[bool]],
        flags: Sequence[Any] = (),
    ) -> None:
        """Call ``judge`` while the step runs, until it has returned True for ``owner``.

        ``judge`` gets a ``Trial`` for each of the variables at ``places``. ``given``
        are the arguments of ``update``, with this rank's rows. Further results of
        ``judge`` are assigned to ``flags``, so that the same step can already read
        them.
        """
        leaves = [leaf for leaf in tf.nest.flatten(given) if has_dense_rows(leaf)]
        if not places or not leaves or len(places) > _MOST_VARIABLES:
            return
        rows = tf.cast(rows_in(leaves[0]), tf.int64)
        known = self.known(owner)

        def judged(rows: Any, *numbers: Array) -> Any:
            trials = [
                Trial(int(rows), *numbers[start : start + _NUMBERS])
                for start in range(0, len(numbers), _NUMBERS)
            ]
            return np.array(judge(trials), np.bool_)

        def look() -> Any:
            numbers = _numbers(update, current, places, given, leaves, rows)
            seen = exchange_in_order(judged, [rows, *numbers], tf.bool)
            said = tf.unstack(tf.ensure_shape(seen, [1 + len(flags)]))
            assigned = [
                flag.assign(value, read_value=False)
                for flag, value in zip((known, *flags), said, strict=True)
            ]
            return tf.group(*assigned)

        tf.cond(tf.logical_or(known, rows < 2), lambda: tf.no_op(), look)


def _numbers(
    update: Update,
    current: Sequence[Any],
    places: Sequence[int],
    given: Any,
    leaves: Sequence[Any],
    rows: Any,
) -> list[Any]:
    """The arrays of a ``Trial`` for each variable, in the order of its fields."""

    shifts = {place: _shift(current[place]) for place in places}

    def moved(place: int, sign: float) -> Any:
        values = [*current]
        values[place] += tf.cast(sign * shifts[place], values[place].dtype)
        return update(values, given)[place]

    def part(start: Any, stop: Any) -> Any:
        def piece(leaf: Any) -> Any:
            if not any(leaf is other for other in leaves):
                return leaf
            return cut(tf.convert_to_tensor(leaf), start, stop)

        return tf.nest.map_structure(piece, given)

    half = rows // 2
    whole = update(current, given)
    first, second = update(current, part(0, half)), update(current, part(half, rows))
    return [
        tf.cast(value, tf.float64)
        for place in places
        for value in (
            shifts[place],
            current[place],
            whole[place],
            moved(place, 1.0),
            moved(place, -1.0),
            first[place],
            second[place],
        )
    ]


def _shift(value: Any) -> Any:
    if value.dtype.is_floating:
        return SHIFT * (1.0 + abs(tf.cast(value, tf.float64)))
    return tf.fill(tf.shape(value), tf.constant(SHIFT, tf.float64))
