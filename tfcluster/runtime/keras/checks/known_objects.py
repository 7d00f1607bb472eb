"""Flags objects that a check has finished with, in variables that graphs can read."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf


class KnownObjects:
    """The objects that a check has finished with."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], tf.Variable]] = {}

    def of(self, judged: Any) -> tf.Variable:
        """The flag of ``judged``, a boolean tf.Variable that is False at first."""
        entry = self._known.get(id(judged))
        if entry is None or entry[0]() is not judged:
            with tf.init_scope():
                variable = tf.Variable(False, trainable=False)
            entry = self._known[id(judged)] = weakref.ref(judged), variable
        return entry[1]
