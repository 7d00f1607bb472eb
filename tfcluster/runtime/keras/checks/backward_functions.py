"""Finds functions of the program that change gradients in the backward pass.

The gradient that reaches a ``tf.custom_gradient`` is the gradient of a rank's own loss.
That loss is a mean over fewer rows than the batch has, so the gradient is larger by the
same factor. This does not matter to a function that multiplies the gradient, because
the gradients of the weights are averaged afterwards. But clipping or a norm treats a
larger gradient differently. So half of the gradient must give half of the result. The
method is tfcluster's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfcluster.runtime import tf_patches
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras.checks.check_steps import RareSteps
from tfcluster.runtime.keras.checks.rounding import TOLERANCES
from tfcluster.runtime.keras.program_lines import is_of_the_user, shown
from tfcluster.runtime.keras.session import OF_A_CHECK, Session
from tfcluster.runtime.tensor_types import Nest, Tensor

_Function: TypeAlias = Callable[..., Any]


class _Check:
    """One function whose gradient is checked."""


class BackwardFunctions:
    """The hook on ``tf.custom_gradient``."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._steps = RareSteps()

    def install(self) -> None:
        """Install the hook in TensorFlow, once per process."""
        tf_patches.TABLE.install({tf_patches.CUSTOM_GRADIENT: self._decorate})

    def _decorate(self, original: _Function, f: _Function | None = None) -> Any:
        """Apply ``original`` to ``f``; check its gradient if ``f`` is a user's."""
        if f is None:
            return lambda given: self._decorate(original, given)
        code = getattr(f, "__code__", None)
        if code is None or not is_of_the_user(code.co_filename):
            return original(f)
        where = f"{shown(Path(code.co_filename))}:{code.co_firstlineno}"
        function, checked = f, _Check()

        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> tuple[Any, _Function]:
            result, gradient = function(*args, **kwargs)
            return result, self._watched(gradient, where, checked)

        return original(watched)

    def _watched(self, gradient: _Function, where: str, checked: _Check) -> _Function:
        """Wrap ``gradient``; TensorFlow sees whether it takes ``variables``."""

        def of_tensors(*upstream: Nest) -> Nest:
            return self._look(gradient, upstream, {}, where, checked)

        def of_variables(*upstream: Nest, variables: Any = None) -> Nest:
            named = {"variables": variables}
            return self._look(gradient, upstream, named, where, checked)

        parameters = inspect.signature(gradient).parameters.values()
        takes_variables = any(
            each.name == "variables" or each.kind is each.VAR_KEYWORD
            for each in parameters
        )
        return of_variables if takes_variables else of_tensors

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _look(
        self,
        gradient: _Function,
        upstream: Sequence[Nest],
        named: Mapping[str, Any],
        where: str,
        checked: _Check,
    ) -> Nest:
        found: Nest = gradient(*upstream, **named)
        session = self._session
        if not session.divides or session.within(OF_A_CHECK):
            return found
        if _is_in_a_gradient_graph():
            return found
        share = session.share
        whole = _numbers(found)
        if not whole or (share is None and session.inside_keras):
            return found
        tolerance = max(TOLERANCES.get(each.dtype.name, 0.0) for each in whole)
        in_loop = share is None

        def judge(*arrays: Array) -> np.bool_:
            count = len(arrays) // 2
            pairs = zip(arrays[:count], arrays[count:], strict=True)
            return np.bool_(self._judge(where, list(pairs), tolerance, in_loop=in_loop))

        def look() -> Tensor:
            halved = tf.nest.map_structure(_half, list(upstream))
            halves = _numbers(gradient(*halved, **named))
            if len(halves) != len(whole):
                return tf.constant(False)
            over = tf.numpy_function(judge, [*whole, *halves], tf.bool)
            end = self._steps.end_if(checked, tf.reshape(over, []))
            with tf.control_dependencies([] if end is None else [end]):
                return tf.identity(tf.reshape(over, []))

        undivided = False if share is None else share.undivided
        due = self._steps.due(checked) & tf.logical_not(undivided)
        with session.once(OF_A_CHECK):
            looked = tf.cond(due, look, lambda: tf.constant(False))
        with tf.control_dependencies([] if tf.executing_eagerly() else [looked]):
            return tf.nest.map_structure(_same, found)

    def _judge(
        self,
        where: str,
        pairs: Sequence[tuple[Array, Array]],
        tolerance: float,
        *,
        in_loop: bool,
    ) -> bool:
        """Compare the gradients with those for half of the upstream gradient."""
        loop = self._session.loop
        if in_loop and (not loop.divided or loop.share.trial):
            return False
        if all(_is_half(half, whole, tolerance) for whole, half in pairs):
            return False
        self._session.differs(
            f"{where}: this function changes gradients in the backward pass by their "
            "size (it clips them, or divides them by their norm). A rank's gradients "
            "are those of the mean over its own rows, so the result differs from that "
            "of one machine"
        )
        return True


def _is_in_a_gradient_graph() -> bool:
    """Whether the current graph is the gradient of a loop's body.

    Such a graph cannot use our variables.
    """
    graph = tf.compat.v1.get_default_graph
    return not tf.executing_eagerly() and "Grad" in type(graph()).__name__


def _is_half(half: Array, whole: Array, tolerance: float) -> bool:
    """Whether ``half`` is half of ``whole``; true if a number is not finite."""
    size = np.abs(whole).max(initial=0.0)
    difference = np.abs(2.0 * half - whole).max(initial=0.0)
    finite = bool(np.isfinite(size) and np.isfinite(difference))
    return not finite or bool(difference <= 2 * tolerance * size)


def _numbers(gradients: Nest) -> list[Tensor]:
    """The floating-point tensors among the gradients, which may be None."""
    return [
        each
        for each in tf.nest.flatten(gradients)
        if isinstance(each, tf.Tensor) and each.dtype.is_floating
    ]


def _half(upstream: Any) -> Any:
    is_number = isinstance(upstream, tf.Tensor) and upstream.dtype.is_floating
    return upstream * tf.cast(0.5, upstream.dtype) if is_number else upstream


def _same(gradient: Any) -> Any:
    return tf.identity(gradient) if isinstance(gradient, tf.Tensor) else gradient
