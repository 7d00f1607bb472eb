"""Rows on a ps: the changed ones are returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tests.runtime.programs import checks
from tfcluster.runtime.collective.transports.base import Slices
from tfcluster.runtime.parameter_server.service import ShardedModel
from tfcluster.runtime.parameter_server.sharding import VariablePiece
from tfcluster.runtime.parameter_server.update_graph import Engine, serialised

ROWS, COLUMNS = 50, 3


def slices(*indices: int) -> Slices:
    values = np.arange(len(indices) * COLUMNS, dtype=np.float32)
    return Slices(values.reshape(-1, COLUMNS) + 1, np.array(indices, np.int64))


def check_subtraction() -> None:
    _check(lambda variable, gradient: variable.scatter_sub(gradient))


def check_addition() -> None:
    _check(lambda variable, gradient: variable.scatter_add(gradient))


def check_deduplicated() -> None:
    """Duplicate indices are summed first, as Keras does."""

    def update(variable: Any, gradient: Any) -> None:
        which, places = tf.unique(gradient.indices)
        values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(which))
        variable.scatter_sub(tf.IndexedSlices(values, which))

    _check(update)


def check_decayed() -> None:
    """The rows are changed again after the scatter."""

    def update(variable: Any, gradient: Any) -> None:
        variable.scatter_sub(gradient)
        variable.assign(0.5 * variable)

    _check(update)


def check_twice() -> None:
    """The graph does not show whether the indices are distinct."""

    def update(variable: Any, gradient: Any) -> None:
        both = tf.concat([gradient.indices, gradient.indices], 0)
        values = tf.concat([gradient.values, gradient.values], 0)
        variable.scatter_sub(tf.IndexedSlices(values, both))

    _check(update)


def _check(update: Callable[[Any, Any], None]) -> None:
    """Check that the rows equal those of ``update`` on a plain variable."""
    replica = tf.Variable(tf.zeros([ROWS, COLUMNS]))
    expected = tf.Variable(tf.zeros([ROWS, COLUMNS]))

    def apply(gradients: list[Any]) -> None:
        update(replica, gradients[0])

    engine = Engine([np.zeros((ROWS, COLUMNS), np.float32)])
    engine.define(serialised(apply, [replica], {}, "s"))
    model = ShardedModel([VariablePiece(0, 0, ROWS, whole=True)], [True], engine)
    for gradient in (slices(7, 3, 9), slices(9, 9, 30), slices(*range(20))):
        update(expected, tf.IndexedSlices(gradient.values, gradient.indices))
        since = model.version
        model.apply([gradient], "s")
        kinds, (values, indices) = model.changes_since(since)
        assert kinds == "s"
        assert sorted(indices) == sorted(set(gradient.indices))
        np.testing.assert_allclose(values, expected.numpy()[indices], rtol=1e-6)
        np.testing.assert_allclose(model.values()[0], expected.numpy(), rtol=1e-6)
    # All rows that another task has missed; then a value that was assigned.
    _, (values, indices) = model.changes_since(0)
    np.testing.assert_allclose(values, expected.numpy()[indices], rtol=1e-6)
    model.apply([slices(1, 2)], "s")
    model.assign(0, np.full((ROWS, COLUMNS), 5, np.float32))
    _, (values,) = model.changes_since(model.version - 1)
    assert set(values.ravel()) == {5.0}


def check_rows_of_another_gradient_are_not_taken_for_its_own() -> None:
    replicas = [tf.Variable(tf.zeros([ROWS, COLUMNS])) for _ in range(2)]

    def apply(gradients: list[Any]) -> None:
        for replica, gradient in zip(replicas, reversed(gradients), strict=True):
            replica.scatter_sub(gradient)

    zeros = np.zeros((ROWS, COLUMNS), np.float32)
    engine = Engine([zeros, zeros])
    engine.define(serialised(apply, replicas, {}, "ss"))
    given = [slices(1, 2, 3), slices(4, 5, 6)]
    engine.apply(given, "ss")
    assert not engine.rows(0, given[0].indices).any()
    np.testing.assert_array_equal(engine.rows(0, given[1].indices), -given[1].values)


checks.run(globals())
