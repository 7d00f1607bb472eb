"""Which ops functions have when they are traced, and whether the rules know them."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfcluster.base.versions import NEWEST, numbers
from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.functions import called_function
from tfcluster.runtime.partition.rules.all import RULES, is_known, why_whole
from tfcluster.runtime.tensor_types import ProtocolBuffer

ROWS = 6
IS_NEWEST = numbers(keras.__version__) >= NEWEST["keras"]
"""Whether Keras has all that the cases need. They are those of the newest version."""
_NOT_THERE = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What Keras raises if it lacks what a case needs, or cannot trace it."""


def ops_of(function: Callable[..., Any], specs: Sequence[Any]) -> set[str]:
    """The op types of a traced function, also those of the functions in it."""
    traced = tf.function(function, autograph=False).get_concrete_function(*specs)
    return ops_of_definition(traced.function_def)


def ops_of_definition(definition: ProtocolBuffer) -> set[str]:
    """The op types of a FunctionDef, also those of the functions in it."""
    found: set[str] = set()
    seen: set[str] = set()
    todo = [definition]
    while todo:
        for node in todo.pop().node_def:
            if tf_functions.is_function(node.op):
                names: Iterable[str] = [node.op]
            else:
                found.add(node.op)
                names = _functions_in(node)
            called = called_function(node)
            for name in (*names, *([called] if called else [])):
                if name not in seen:
                    seen.add(name)
                    inner = tf_functions.definition_of(name)
                    if inner is not None:
                        todo.append(inner)
    return found


def _functions_in(node: ProtocolBuffer) -> Iterator[str]:
    for value in node.attr.values():
        kind = value.WhichOneof("value")
        if kind == "func":
            yield value.func.name
        elif kind == "list":
            yield from (each.name for each in value.list.func)


def unknown(ops: Iterable[str]) -> list[str]:
    """The ops that have neither a rule nor a reason to be computed whole."""
    return sorted(op for op in set(ops) if not is_known(op))


class Coverage:
    """The ops of what has been traced, and what could not be traced."""

    def __init__(self) -> None:
        self.names: dict[str, set[str]] = collections.defaultdict(set)
        self.failures: list[str] = []

    def trace(
        self, name: str, *functions: Callable[..., Any], specs: Sequence[Any]
    ) -> None:
        """Trace the first of these functions that can be traced.

        The number of rows is unknown at first.
        """
        known = [
            tf.TensorSpec((ROWS, *each.shape[1:]), each.dtype) if each.shape else each
            for each in specs
        ]
        error = None
        for function in functions:
            for given in (specs, known):
                try:
                    found = ops_of(function, given)
                except _NOT_THERE as caught:
                    error = caught
                    continue
                for op in found:
                    self.names[op].add(name)
                return
        self._failed(name, error)

    def made(self, name: str, make: Callable[[], Any]) -> Any:
        """What ``make`` makes; None if Keras lacks it."""
        try:
            return make()
        except (*_NOT_THERE, NotImplementedError) as error:
            self._failed(name, error)
            return None

    def _failed(self, name: str, error: Exception | None) -> None:
        self.failures.append(f"{name}: {type(error).__name__}: {error}")

    def check(self) -> None:
        """Print the ops; fail for those that are in no table, or not traced.

        With an older Keras, print what was not traced.
        """
        for op in sorted(self.names):
            reason = why_whole(op)
            whole = "by the passes" if reason is None else f"whole, since {reason}"
            line = f"{op}: {'divided' if op in RULES else whole}"
            print(line)  # noqa: T201 - the list of ops
        missing = [f"{op}: {sorted(self.names[op])}" for op in unknown(self.names)]
        problems = [*(self.failures if IS_NEWEST else ()), *missing]
        if not IS_NEWEST:
            print(*self.failures, sep="\n")  # noqa: T201
        assert not problems, "\n".join(["", *problems])


def public(module: Any) -> list[str]:
    """One name for each function and class: several are known by two or three."""
    found = {
        id(getattr(module, name)): name
        for name in reversed(dir(module))
        if name[0] != "_" and callable(getattr(module, name))
    }
    return sorted(found.values())


def tensors(values: Any) -> list[Any]:
    return [each for each in tf.nest.flatten(values) if tf.is_tensor(each)]


def energy(values: Iterable[Any]) -> Any:
    """A scalar that depends on all numbers; None if there are none."""
    terms = []
    for value in values:
        dtype = tf.as_dtype(value.dtype)
        if dtype.is_complex:
            value = tf.abs(tf.cast(value, tf.complex64))
        if dtype.is_floating or dtype.is_complex:
            terms.append(tf.reduce_sum(tf.cast(value, tf.float32) ** 2))
    return tf.add_n(terms) if terms else None


def gradients(tape: Any, target: Any, sources: Sequence[Any]) -> list[Any]:
    found = tape.gradient(target, sources)
    return [tf.convert_to_tensor(each) for each in found if each is not None]
