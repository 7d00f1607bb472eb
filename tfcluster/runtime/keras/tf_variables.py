"""Treat variables of Keras and of TensorFlow alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf


def raw(variable: Any) -> Any:
    """The tf.Variable of a Keras variable; others are returned as they are."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def have_values(variables: Iterable[Any]) -> bool:
    """Whether all variables are initialised.

    A ``tf.function`` that creates variables is traced twice: once to create them, and
    again when their initial values have been computed. During the first trace they have
    no values yet.
    """
    with tf.init_scope():
        return all(bool(raw(variable).is_initialized()) for variable in variables)
