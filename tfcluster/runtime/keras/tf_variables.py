"""Treat variables of Keras and of TensorFlow alike."""

from __future__ import annotations

from typing import Any

import keras


def raw(variable: Any) -> Any:
    """The tf.Variable of a Keras variable; others are returned as they are."""
    return variable.value if isinstance(variable, keras.Variable) else variable
