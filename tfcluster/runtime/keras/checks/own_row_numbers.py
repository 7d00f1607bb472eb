"""Points out a program that reads a number of its rank's rows like one of the batch.

A step in a loop of the program gets a rank's rows. Its gradients are exchanged, and
metrics are merged; but the loss that it returns is that of these rows. A program that
prints it, keeps it, or decides by it (saves the best weights) does so with the chief's.
Such numbers are marked: what a ``tf.function`` returns that has exchanged gradients,
unless it comes from an exchange or from variables only; the target of an eager tape;
and what the program computes of these by arithmetic. In a step of the program's own
that ``fit`` runs eagerly, it is every number that comes from the step's rows. Reading
one is a warning, once.
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
"""How the ops begin that an exchange consists of; its results are all ranks'."""
_NOT_OF_ROWS = (
    *_ALIKE,
    *("Shape", "Size", "Rank", "ZerosLike", "OnesLike"),
    *("PartitionedCall", "StatefulPartitionedCall"),
)
"""How the ops begin whose outputs do not come from the values of a rank's rows. Some
results of a function do, others come from an exchange in it."""


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
        """What the running function has traced: graphs, and lines of gradients."""
        self._functions: weakref.WeakKeyDictionary[
            Function, tuple[str, frozenset[int]]
        ] = weakref.WeakKeyDictionary()
        """Where a function differentiates, and the places of its results to mark."""

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
        # Looked up once: an eager loop comes here in every step.
        self._eager_line = self._eager_line or user_line()
        for each in tf.nest.flatten(target):
            self._mark(each, f"the step at {self._eager_line}")

    @contextmanager
    def following(self, data: Nest, step: str) -> Iterator[None]:
        """Within this context, mark the numbers that are computed from ``data``.

        ``data`` are this rank's rows, with which a step of the program runs eagerly;
        ``step`` names it.
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
        # A metric may read what it likes: how it depends on the rows is found out.
        in_metric = self._session.within("update_state")
        if where is not None and not in_metric and (line := _line_of_the_user()):
            self._told = True
            self._session.warn(
                f"{line} reads a number that {where} has computed from the "
                "rows of one rank. What the program prints, keeps or decides by it is "
                "not what it is on one machine. A Keras metric that is updated with "
                "the number (keras.metrics.Mean) has that of the whole batch"
            )
        return original(tensor, *args, **kwargs)


class _Follower:
    """Follows, eagerly, what is computed from the rows of a batch."""

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
    """Which of the function's results, counted flat, its arguments have an effect on.

    What comes from an exchange is the same on all ranks, and so does not count.
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
    """``FILE:LINE`` of the program, if that is what has called the tensor's method."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _HOOKS:
        frame = frame.f_back
    if frame is None or not _is_of_the_user(frame.f_code.co_filename):
        return ""  # Keras, such as a metric, TensorFlow, or an exchange of ours
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
