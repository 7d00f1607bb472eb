"""Functions that XLA was to compile, and in which gradients are applied.

An exchange is plain Python and cannot be compiled. ``tf.function(jit_compile=True)`` is
traced as usual; where that comes upon an optimizer, the function runs without XLA.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfcluster.runtime.keras.checks.shape_errors import ShapeErrors
from tfcluster.runtime.keras.graph_order import refuse_xla, take_refusal
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.patching import wrap


class XlaFallback:
    """The hooks on ``tf.function`` and, before that of the exchange, on ``apply``."""

    def __init__(self, session: Session, shape_errors: ShapeErrors) -> None:
        self._session = session
        self._shape_errors = shape_errors
        self._plain: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        wrap(type(tf.function(lambda: None)), "__call__", self._call)
        wrap(keras.optimizers.Optimizer, "apply", self._apply)
        wrap(keras.optimizers.LossScaleOptimizer, "apply", self._apply)

    def _apply(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        refuse_xla()
        return original(*args, **kwargs)

    def _call(
        self, original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any
    ) -> Any:
        with self._shape_errors.in_function():
            return self._with_or_without_xla(original, function, *args, **kwargs)

    def _with_or_without_xla(
        self, original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not function._jit_compile:
            return original(function, *args, **kwargs)
        plain = self._plain.get(function)
        if plain is None:
            try:
                return original(function, *args, **kwargs)
            except Exception:
                if not take_refusal():
                    raise
            self._session.warn(
                f"tf.function {function.name} applies gradients: it runs without "
                "jit_compile=True, because XLA cannot compile an exchange"
            )
            plain = self._plain[function] = _without_xla(function)
        return plain(*args, **kwargs)


def _without_xla(function: Any) -> Any:
    plain = function._clone(None)
    plain._jit_compile = None
    return plain
