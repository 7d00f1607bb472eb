"""Warns if a program reads a number of one rank's rows as if the batch had given it.

A step in a loop of the program gets a rank's rows. Its gradients are exchanged and its
metrics are merged, but the step returns the loss of these rows only. A program that
prints, keeps or decides by this loss (saves the best weights) does so with the chief's.
Such numbers are marked: the results of a ``tf.function`` that has exchanged gradients,
unless they come only from an exchange or from variables; the target of an eager tape;
and every number that the program computes from these by arithmetic. In the program's
own step that ``fit`` runs eagerly, every number that comes from the step's rows is
marked. Reading a marked number causes one warning.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import tensorflow as tf

from tfcluster.runtime import contract, tf_internals, tf_patches
from tfcluster.runtime.keras.object_map import ObjectMap
from tfcluster.runtime.keras.program_lines import (
    is_of_the_user,
    shown,
    user_line,
)
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.tensor_types import Graph, Nest, Operation, Tensor
from tfcluster.runtime.tf_internals import Function

_ROWS = ("IteratorGetNext", "IteratorGetNextSync", "OptionalGetValue")
"""Ops whose outputs are rows of a dataset."""
_ALIKE = ("PyFunc", "EagerPyFunc", "PyFuncStateless", "Collective")
"""How the names of an exchange's ops begin. All ranks get the same results from it."""
_NOT_OF_ROWS = (
    *_ALIKE,
    *("Shape", "Size", "Rank", "ZerosLike", "OnesLike"),
    *("PartitionedCall", "StatefulPartitionedCall"),
)
"""How the names of ops begin whose outputs do not come from the values of a rank's
rows. Some results of a function come from them, and others from an exchange in it."""


class OwnRowNumbers:
    """The hooks on functions, and on eager tensors once one is marked."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._told = False
        self._watches = False
        self._eager_line = ""
        self._marks = ObjectMap[str]()
        """Where an eager tensor was computed."""
        self._traced: list[tuple[Graph, str]] = []
        """Graphs that the running function has traced, and the lines of gradients."""
        self._functions: weakref.WeakKeyDictionary[
            Function, tuple[str, frozenset[int]]
        ] = weakref.WeakKeyDictionary()
        """The line in which a function differentiates, and which results to mark."""

    def install(self) -> None:
        tf_patches.TABLE.install({tf_patches.FUNCTION_CALL: self._call})

    def differentiated(self, target: Nest) -> None:
        """Record the target of a tape whose gradients are exchanged."""
        if not self._concerns():
            return
        if not tf.executing_eagerly():
            self._traced.append((tf_internals.outermost_graph(), user_line()))
            return
        if not self._session.loop.divided:
            return  # All ranks have the same rows.
        # Looked up once, because an eager loop calls this in every step.
        self._eager_line = self._eager_line or user_line()
        for each in tf.nest.flatten(target):
            self._mark(each, f"the step at {self._eager_line}")

    @contextmanager
    def following(self, data: Nest, step: str) -> Iterator[None]:
        """Within this context, mark the numbers that are computed from ``data``.

        ``data`` contains this rank's rows, with which a step of the program runs
        eagerly; ``step`` names that step.
        """
        if self._told or self._session.size == 1:
            yield
            return
        follower = _Follower(data, lambda number: self._mark(number, step))
        tf_internals.observe_ops(follower)
        try:
            yield
        finally:
            tf_internals.stop_observing_ops(follower)

    def _concerns(self) -> bool:
        session = self._session
        return (
            not self._told
            and session.size > 1
            and session.share is None
            and session.current_shard is None
        )

    # --- at functions ---------------------------------------------------------------

    def _call(
        self,
        original: Callable[..., Nest],
        function: Function,
        *args: Any,
        **kwargs: Any,
    ) -> Nest:
        if not self._concerns() or not tf.executing_eagerly():
            return original(function, *args, **kwargs)
        self._traced.clear()
        result = original(function, *args, **kwargs)
        if self._traced:
            self._study(function)
        where, places = self._functions.get(function, ("", frozenset()))
        if places and self._session.loop.divided:
            for place, each in enumerate(tf.nest.flatten(result)):
                if place in places:
                    self._mark(each, f"the step at {where}")
        return result

    def _study(self, function: Function) -> None:
        """Find out which results of the new trace come from the rank's rows."""
        where, places = self._functions.get(function, ("", frozenset()))
        for graph, line in self._traced:
            where = where or line
            places |= _places_of_rows(graph)
        self._traced.clear()
        self._functions[function] = where, places

    # --- at eager tensors -----------------------------------------------------------

    def _mark(self, tensor: Any, where: str) -> None:
        kinds = tensor.dtype.is_floating or tensor.dtype == tf.bool
        if not tf_internals.is_eager(tensor) or not kinds:
            return
        if not self._watches:
            self._watches = True
            tf_patches.TABLE.install(
                {
                    **dict.fromkeys(tf_patches.TENSOR_READS, self._read),
                    **dict.fromkeys(tf_patches.TENSOR_ARITHMETIC, self._computed),
                }
            )
        self._marks[tensor] = where

    def _computed(
        self, original: Callable[..., Tensor], tensor: Tensor, *args: Any
    ) -> Tensor:
        result = original(tensor, *args)
        if not self._told:
            for each in (tensor, *args):
                where = self._marks.get(each)
                if where is not None and tf_internals.is_eager(result):
                    self._marks[result] = where
        return result

    def _read(
        self,
        original: Callable[..., object],
        tensor: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> object:
        where = None if self._told else self._marks.get(tensor)
        # A metric may read any number: another check finds how it depends on the rows.
        in_metric = self._session.within("update_state")
        if where is not None and not in_metric and (line := _line_of_the_user()):
            self._told = True
            self._session.warn(
                f"{line} reads a number that {where} has computed from the "
                "rows of one rank. On one machine the number is different, and so is "
                "everything that the program prints, keeps or decides with it. A Keras "
                "metric that is updated with the number (keras.metrics.Mean) gives the "
                "result for the whole batch"
            )
        return original(tensor, *args, **kwargs)


class _Follower:
    """Follows the tensors that are computed eagerly from the rows of a batch."""

    def __init__(self, data: Nest, found: Callable[[Tensor], None]) -> None:
        """``found`` is called with each scalar."""
        self._found = found
        self._known = ObjectMap[bool]()
        for leaf in tf.nest.flatten(data):
            if tf.is_tensor(leaf):
                self._known[leaf] = True

    def __call__(
        self,
        kind: str | bytes,
        inputs: Sequence[Tensor],
        attrs: Sequence[Any],
        outputs: Sequence[Tensor],
        op_name: str | None = None,
        graph: tf.Graph | None = None,
    ) -> None:
        """TensorFlow calls this after each operation that it executes eagerly."""
        if graph is not None or not any(map(self._known.get, inputs)):
            return
        name = kind.decode() if isinstance(kind, bytes) else kind
        if name.startswith(_NOT_OF_ROWS):
            return
        for output in outputs:
            self._known[output] = True
            if output.shape.rank == 0:
                self._found(output)


def _places_of_rows(graph: Graph) -> frozenset[int]:
    """The indices of the function's flattened results that depend on its arguments.

    The results of an exchange do not count, because they are the same on all ranks.
    """
    captured = {id(inner) for _, inner in graph.captures}
    found = tf.nest.flatten(graph.structured_outputs)
    return frozenset(
        place
        for place, each in enumerate(found)
        if tf.is_tensor(each) and each.dtype.is_floating and _is_of_rows(each, captured)
    )


def _is_of_rows(result: Tensor, captured: set[int]) -> bool:
    todo, seen = [result], set[int]()
    while todo:
        tensor = todo.pop()
        operation: Operation = tensor.op
        if operation.type == "Placeholder" and id(tensor) not in captured:
            return True
        if operation.type in _ROWS:
            return True
        if id(operation) not in seen and not operation.type.startswith(_ALIKE):
            seen.add(id(operation))
            todo += operation.inputs
    return False


def _line_of_the_user() -> str:
    """``FILE:LINE`` of the program if the program called the tensor's method, or ''."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _HOOKS:
        frame = frame.f_back
    if frame is None or not _is_of_the_user(frame.f_code.co_filename):
        return ""  # Keras (such as a metric), TensorFlow, or one of our exchanges
    while frame is not None and _is_installed(frame.f_code.co_filename):
        frame = frame.f_back  # numpy, on behalf of the program
    if frame is None:
        return ""
    return f"{shown(Path(frame.f_code.co_filename))}:{frame.f_lineno}"


_HOOKS = {__file__, contract.__file__}
"""Files of the functions between a method of a tensor and its caller."""
_is_of_the_user = cache(is_of_the_user)


@cache
def _is_installed(file: str) -> bool:
    return bool({"site-packages", "dist-packages"} & {*Path(file).parts})
