"""Tests an update of variables with other old values and with halves of the rows.

The results show how the ranks' values must be combined; see ``state_updates``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras.batches.batch_slicing import (
    has_dense_rows,
    rows_in,
    slice_some,
)
from tfcluster.runtime.keras.checks.known_objects import KnownObjects
from tfcluster.runtime.keras.graph_order import exchange_in_order
from tfcluster.runtime.keras.state.state_updates import SHIFT, Trial
from tfcluster.runtime.tensor_types import Leaf, Nest, Number, Tensor, Variable

_MOST_VARIABLES = 8
"""The update is traced twice for each variable."""
_NUMBERS = 7
"""The number of arrays in a ``Trial``."""

Update = Callable[[Sequence[Tensor], Nest], Sequence[Tensor]]
"""Computes new values of variables from old ones and the arguments of a call."""


class Trials:
    """Tests each update once, in the first step that has at least two rows."""

    def __init__(self) -> None:
        self._judged = KnownObjects()
        self._local = threading.local()

    @property
    def trying(self) -> bool:
        """Whether this thread is in ``attempt``, and so must not change anything."""
        return bool(getattr(self._local, "trying", False))

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Within this context ``trying`` is True; an error ends it and is ignored.

        The error may mean that the layer or metric does not support such a call.
        """
        self._local.trying = True
        try:
            with contextlib.suppress(Exception):
                yield
        finally:
            self._local.trying = False

    def known(self, owner: object) -> Variable:
        """A scalar boolean variable: True once everything is known about ``owner``."""
        known: Variable = self._judged.of(owner)
        return known

    def look(
        self,
        owner: object,
        update: Update,
        current: Sequence[Tensor],
        places: Sequence[int],
        given: Nest,
        judge: Callable[[Sequence[Trial]], Sequence[bool]],
        flags: Sequence[Variable] = (),
        gather: Callable[[Nest], Nest] = lambda given: given,
    ) -> None:
        """Call ``judge`` while the step runs, until it has returned True for ``owner``.

        ``judge`` gets a ``Trial`` for each of the variables at ``places``, which are
        indices into ``current``, the variables' values. ``given`` are the arguments of
        ``update``, with this rank's rows. ``gather`` returns the arguments to be
        tested, and is called only in steps that test. Further results of ``judge`` are
        assigned to ``flags``, so that the same step can already read them.
        """
        leaves = [leaf for leaf in tf.nest.flatten(given) if has_dense_rows(leaf)]
        if not places or not leaves or len(places) > _MOST_VARIABLES:
            return
        known = self.known(owner)

        def judged(rows: np.int64, *numbers: Array) -> Array:
            trials = [
                Trial(int(rows), *numbers[start : start + _NUMBERS])
                for start in range(0, len(numbers), _NUMBERS)
            ]
            return np.array(judge(trials), np.bool_)

        def look() -> object:
            tested = gather(given)
            leaves = [leaf for leaf in tf.nest.flatten(tested) if has_dense_rows(leaf)]
            rows = tf.cast(rows_in(leaves[0]), tf.int64)
            return tf.cond(
                rows < 2,
                lambda: tf.no_op(),
                lambda: look_at(tested, leaves, rows),
            )

        def look_at(given: Nest, leaves: Sequence[Leaf], rows: Tensor) -> object:
            numbers = _numbers(update, current, places, given, leaves, rows)
            seen = exchange_in_order(judged, [rows, *numbers], tf.bool)
            said = tf.unstack(tf.ensure_shape(seen, [1 + len(flags)]))
            assigned = [
                flag.assign(value, read_value=False)
                for flag, value in zip((known, *flags), said, strict=True)
            ]
            return tf.group(*assigned)

        tf.cond(known, lambda: tf.no_op(), look)


def _numbers(
    update: Update,
    current: Sequence[Tensor],
    places: Sequence[int],
    given: Nest,
    leaves: Sequence[Leaf],
    rows: Tensor,
) -> list[Tensor]:
    """The arrays of a ``Trial`` for each variable, in the order of its fields."""

    shifts = {place: _shift(current[place]) for place in places}

    def moved(place: int, sign: float) -> Tensor:
        values = [*current]
        values[place] += tf.cast(sign * shifts[place], values[place].dtype)
        return update(values, given)[place]

    def part(start: Number, stop: Number) -> Nest:
        return slice_some(given, leaves, start, stop)

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


def _shift(value: Tensor) -> Tensor:
    if value.dtype.is_floating:
        relative: Tensor = SHIFT * (1.0 + abs(tf.cast(value, tf.float64)))
        return relative
    shift: Tensor = tf.fill(tf.shape(value), tf.constant(SHIFT, tf.float64))
    return shift
