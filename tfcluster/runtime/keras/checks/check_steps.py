"""Chooses the steps in which a check runs: the first, second, fourth, eighth, ..."""

from __future__ import annotations

import tensorflow as tf

from tfcluster.runtime.keras.object_map import ObjectMap
from tfcluster.runtime.keras.tf_variables import new_variable
from tfcluster.runtime.tensor_types import Tensor

_ENDED = -1


class RareSteps:
    """Counts the steps of each object that is checked, eagerly and in graphs."""

    def __init__(self) -> None:
        self._counts = ObjectMap[tf.Variable]()

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def due(self, checked: object) -> Tensor:
        """Count a step of ``checked``; return whether to check it, a boolean scalar."""
        count = self._counts.of(checked, _new_count)
        # An ended count is not increased: a check that is over is never due again.
        step = count.assign_add(tf.cast(count >= 0, tf.int64))
        return (step > 0) & tf.equal(tf.bitwise.bitwise_and(step, step - 1), 0)

    def end_if(self, checked: object, over: Tensor) -> Tensor:
        """Check ``checked`` never again if ``over``, a boolean scalar.

        Returns the op that remembers it, which a graph has to run.
        """
        count = self._counts.of(checked, _new_count)
        ended = tf.constant(_ENDED, tf.int64)
        return count.assign(tf.where(over, ended, count), read_value=False)


def _new_count() -> tf.Variable:
    with tf.device("CPU:0"):
        return new_variable(0, tf.int64)
