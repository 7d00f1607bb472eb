"""Chooses the steps in which a check runs: the first, second, fourth, eighth, ..."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

_ENDED = -1


class RareSteps:
    """Counts the steps of each object that is checked, eagerly and in graphs."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], tf.Variable]] = {}

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def due(self, checked: Any) -> Any:
        """Count a step of ``checked``; return whether to check it, a boolean tensor."""
        count = self._count(checked)
        # An ended count is not increased: a check that is over is never due again.
        step = count.assign_add(tf.cast(count >= 0, tf.int64))
        return (step > 0) & tf.equal(tf.bitwise.bitwise_and(step, step - 1), 0)

    def end_if(self, checked: Any, over: Any) -> Any:
        """Check ``checked`` never again if ``over``, a boolean tensor."""
        count = self._count(checked)
        ended = tf.constant(_ENDED, tf.int64)
        return count.assign(tf.where(over, ended, count), read_value=False)

    def _count(self, checked: Any) -> tf.Variable:
        entry = self._known.get(id(checked))
        if entry is None or entry[0]() is not checked:
            # In a separate thread: a tf.function that is traced again does not allow
            # new variables in the thread that traces it.
            with ThreadPoolExecutor(1) as thread:
                variable = thread.submit(_new_count).result()
            entry = self._known[id(checked)] = weakref.ref(checked), variable
        return entry[1]


def _new_count() -> tf.Variable:
    with tf.device("CPU:0"):
        return tf.Variable(0, trainable=False, dtype=tf.int64)
