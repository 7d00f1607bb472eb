"""Keras's variables and TensorFlow's, seen alike."""

from __future__ import annotations

from typing import Any

import keras


def raw(variable: Any) -> Any:
    """The tf.Variable of a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable
