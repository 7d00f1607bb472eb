"""Run functions without XLA if gradients are applied in them.

An exchange is plain Python and cannot be compiled. ``tf.function(jit_compile=True)`` is
traced as usual; if the trace reaches an optimizer, the function runs without XLA.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfcluster.runtime import tf_internals, tf_patches
from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.keras.training_session import TrainingSession
from tfcluster.runtime.keras.types import Model
from tfcluster.runtime.tf_internals import TracedFunction


def without_xla(model: Model) -> bool:
    """Disable XLA for a compiled model, as Keras does under ``tf.distribute``.

    XLA cannot compile an exchange. Functions that Keras has traced are created again.
    Returns whether the model would have been compiled by XLA.
    """
    if not model.compiled or not model.jit_compile:
        return False
    model.jit_compile = False
    model.train_function = model.test_function = None
    return True


_refused = threading.local()
"""Set per thread, because AutoGraph replaces the exception with its own."""


def refuse_xla() -> None:
    """Raise CollectiveError if the graph being traced is to be compiled by XLA."""
    graph = tf.compat.v1.get_default_graph
    if not tf.executing_eagerly() and tf_internals.is_in_xla(graph()):
        _refused.lately = True
        raise CollectiveError("XLA cannot compile an exchange of gradients")


class XlaFallback:
    """The hook on ``tf.function``."""

    def __init__(self, session: TrainingSession) -> None:
        self._session = session
        self._plain: weakref.WeakKeyDictionary[TracedFunction, TracedFunction] = (
            weakref.WeakKeyDictionary()
        )
        """The functions without XLA, by the functions with XLA."""

    def install(self) -> None:
        """Install the hook in TensorFlow, once per process."""
        tf_patches.TABLE.install({tf_patches.FUNCTION_CALL: self._call})

    def _call(
        self,
        original: Callable[..., object],
        function: TracedFunction,
        *args: Any,
        **kwargs: Any,
    ) -> object:
        if not tf_internals.is_for_xla(function):
            return original(function, *args, **kwargs)
        plain = self._plain.get(function)
        if plain is None:
            try:
                return original(function, *args, **kwargs)
            except Exception:
                if not getattr(_refused, "lately", False):
                    raise
                _refused.lately = False
            self._session.warn(
                f"tf.function {function.name} applies gradients: it runs without "
                "jit_compile=True, because XLA cannot compile an exchange"
            )
            plain = tf_internals.without_xla(function)
            self._plain[function] = plain
        return plain(*args, **kwargs)
