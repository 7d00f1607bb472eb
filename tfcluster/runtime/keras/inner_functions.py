"""Functions of the program that are called while another function is traced.

TensorFlow keeps the trace of a ``tf.function`` that a step calls, and uses it in later
traces of the step. Ranks trace a step more often than one machine, and a trace on ranks
uses tensors of the step around it, such as the number of the rank's rows. So each trace
of a step calls its own copies of these functions.

TensorFlow inlines calls of functions, so an op that draws random numbers has one state
for each call. A function with such ops therefore has one copy for each call.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfcluster.runtime import contract, tf_internals, tf_patches
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.tensor_types import Nest
from tfcluster.runtime.tf_internals import Function

_LIBRARIES = ("keras", "tensorflow", "tfcluster")


@dataclass(slots=True)
class _Traced:
    """What a graph has called while it was traced."""

    calls: Counter[str] = field(default_factory=Counter)
    """How often functions were called, by their names."""
    copies: dict[int, tuple[Function, Function]] = field(default_factory=dict)
    """The last copy of each function, by the id of the function."""


class InnerFunctions:
    """The hook on calls of functions, for calls within a trace."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._stateful: weakref.WeakSet[Function] = weakref.WeakSet()
        self._around: ContextVar[tuple[tuple[str, int], ...]] = ContextVar(
            "around", default=()
        )
        self._traced: ContextVar[tuple[Function, ...]] = ContextVar(
            "traced", default=()
        )

    def install(self) -> None:
        """Install the hook in TensorFlow, once per process."""
        tf_patches.TABLE.install({tf_patches.FUNCTION_CALL: self._call})

    @property
    def place(self) -> tuple[tuple[str, int], ...]:
        """The calls that led to the function that is being traced; the outermost first.

        Each is the function's name and the number of the call among those by the same
        caller. It is the same in each trace of a step. The function that is called
        eagerly is left out.
        """
        return self._around.get()

    def keep_states(self) -> None:
        """Record that the functions that are being traced have ops with states."""
        self._stateful.update(self._traced.get())

    def _call(
        self,
        original: Callable[..., Nest],
        function: Function,
        *args: Any,
        **kwargs: Any,
    ) -> Nest:
        if tf.executing_eagerly():
            return original(function, *args, **kwargs)
        graph = tf_internals.function_graph()
        traced = contract.attached(graph, "_tfcluster_traced", _Traced)
        program = function.python_function
        name = getattr(program, "__qualname__", type(program).__name__)
        traced.calls[name] += 1
        call = name, traced.calls[name]
        around = self._around.set((*self._around.get(), call))
        functions = self._traced.set((*self._traced.get(), function))
        try:
            return original(self._copy(function, traced), *args, **kwargs)
        finally:
            self._traced.reset(functions)
            self._around.reset(around)

    def _copy(self, function: Function, traced: _Traced) -> Function:
        session = self._session
        in_step = session.share is not None or session.loop.in_pass
        if not in_step or not is_of_the_program(function):
            return function
        known = traced.copies.get(id(function))
        if known is not None and function not in self._stateful:
            return known[1]
        copy = tf_internals.copy_of(function)
        traced.copies[id(function)] = function, copy
        return copy


def is_of_the_program(function: Function) -> bool:
    """Whether a function is the program's, and not that of a library we know."""
    module = getattr(function.python_function, "__module__", None)
    return str(module).partition(".")[0] not in _LIBRARIES
