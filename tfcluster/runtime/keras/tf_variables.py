"""Treats Keras and TensorFlow variables alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import keras
import tensorflow as tf

from tfcluster.runtime import tf_internals
from tfcluster.runtime.keras import types
from tfcluster.runtime.tensor_types import TensorLike, Variable


def raw(variable: types.KerasVariable | Variable) -> Variable:
    """The tf.Variable of a Keras variable; others are returned as they are."""
    if isinstance(variable, keras.Variable):
        return variable.value
    return cast("Variable", variable)


def held(variable: Any) -> Sequence[Variable]:
    """The variable itself; or what it holds, if it is one of a ``MirroredStrategy``.

    Such a variable has no handle in the strategy's scope, and no value in another's.
    """
    return getattr(variable, "values", (variable,))


def new_variable(value: TensorLike, *, name: str | None = None) -> Variable:
    """A non-trainable tf.Variable of ours, created at once outside of any graph.

    It has the shape and the dtype of ``value``. It can be created at any time, even in
    the second trace of a ``tf.function``, which does not allow the program to create
    variables.
    """
    plain = tf.variable_creator_scope(tf_internals.plain_variable)
    with tf.init_scope(), plain:
        return tf.Variable(value, trainable=False, name=name)


def have_values(variables: Iterable[types.KerasVariable | Variable]) -> bool:
    """Whether all variables are initialised.

    A ``tf.function`` that creates variables is traced twice: once to create them, and
    again when their initial values have been computed. During the first trace the
    variables have no values yet.
    """
    with tf.init_scope():
        return all(bool(raw(variable).is_initialized()) for variable in variables)
