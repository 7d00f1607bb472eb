"""Treat variables of Keras and of TensorFlow alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import keras
import tensorflow as tf

from tfcluster.runtime import tf_internals
from tfcluster.runtime.keras import types
from tfcluster.runtime.keras.object_map import ObjectMap
from tfcluster.runtime.tensor_types import DTypeLike, Tensor, TensorLike, Variable

_ours = ObjectMap[bool]()
"""The handles of the variables that ``new_variable`` has made."""


def raw(variable: types.Variable | Variable) -> Variable:
    """The tf.Variable of a Keras variable; others are returned as they are."""
    if isinstance(variable, keras.Variable):
        return variable.value
    return cast("Variable", variable)


def new_variable(
    value: TensorLike, dtype: DTypeLike | None = None, *, name: str | None = None
) -> Variable:
    """A tf.Variable of ours, which is not trained; made at once, outside of any graph.

    Its shape is that of ``value``, its dtype ``dtype`` or that of ``value``. It may be
    made at any time, also in the second trace of a ``tf.function``, which forbids the
    program to create variables.
    """
    plain = tf.variable_creator_scope(tf_internals.plain_variable)
    with tf.init_scope(), plain:
        made = tf.Variable(value, trainable=False, dtype=dtype, name=name)
    _ours[made.handle] = True
    return made


@contextmanager
def made_at_once() -> Iterator[None]:
    """Variables of Keras that are created meanwhile have their values at once.

    A ``tf.function`` that creates variables is traced twice, and the second trace is
    the one that counts. These variables are not among those that it creates. A
    strategy's scope is left as it is, because its variables are of a different kind.
    """
    if tf.executing_eagerly() or tf.distribute.has_strategy():
        yield
        return
    with tf.variable_creator_scope(tf_internals.plain_variable):
        yield


def is_ours(handle: Tensor) -> bool:
    """Whether ``handle`` is that of a variable that ``new_variable`` has made."""
    return handle in _ours


def have_values(variables: Iterable[types.Variable | Variable]) -> bool:
    """Whether all variables are initialised.

    A ``tf.function`` that creates variables is traced twice: once to create them, and
    again when their initial values have been computed. During the first trace they have
    no values yet.
    """
    with tf.init_scope():
        return all(bool(raw(variable).is_initialized()) for variable in variables)
