"""Flags objects that a check has finished with, in variables that graphs can read."""

from __future__ import annotations

import tensorflow as tf

from tfcluster.runtime.keras.object_map import ObjectMap
from tfcluster.runtime.keras.tf_variables import new_variable


class KnownObjects:
    """The objects that a check has finished with."""

    def __init__(self) -> None:
        self._flags = ObjectMap[tf.Variable]()

    def of(self, judged: object) -> tf.Variable:
        """The flag of ``judged``, a boolean scalar variable that is False at first."""
        return self._flags.of(judged, new_flag)


def new_flag() -> tf.Variable:
    """A boolean tf.Variable that is False at first; works while a graph is traced."""
    flag: tf.Variable = new_variable(False)
    return flag
