"""Which functions of ``tf.data`` ranks may call for some elements only.

A function may be divided if what it returns depends on the element alone. Then it does
not matter whether elements are left out, repeated or put in another order before or
after it. Random numbers that it draws from a state are no part of it: see
``input_pipelines``.
"""

from __future__ import annotations

import gc
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime.partition import tf_datasets, tf_functions
from tfcluster.runtime.partition.functions import (
    BRANCHES,
    CALLS,
    LOOPS,
    Function,
    all_nodes,
    function_named,
)
from tfcluster.runtime.partition.graph import elements_of
from tfcluster.runtime.partition.rules.random import WITH_STATE, is_draw
from tfcluster.runtime.tensor_types import (
    Array,
    ConcreteFunction,
    Dataset,
    Operation,
    ProtocolBuffer,
    Tensor,
)


class Undivided(Exception):
    """Why a pipeline is not divided."""


_PYTHON = frozenset(("EagerPyFunc", "PyFunc", "PyFuncStateless"))
_WITHOUT_EFFECT = frozenset((*CALLS, *LOOPS, *BRANCHES, "Assert", "NoOp"))
"""Ops that TensorFlow calls stateful, though they depend on their inputs alone."""
_LOOKUPS = frozenset(
    f"LookupTable{name}{version}" for name in ("Find", "Size") for version in ("", "V2")
)


@dataclass(frozen=True, slots=True)
class MapFunction:
    """The function of a ``map``, which gets and returns flat tensors."""

    concrete: ConcreteFunction
    definition: Function

    @property
    def arguments(self) -> int:
        """How many tensors it gets, without those that it has captured."""
        captured = self.concrete.captured_inputs
        return len(self.concrete.inputs) - len(captured)


def dense_specs(dataset: Dataset, what: str) -> Sequence[tf.TensorSpec]:
    """The specs of a dataset's tensors. Raises Undivided if these are not dense."""
    specs: Sequence[tf.TensorSpec] = tf.nest.flatten(dataset.element_spec)
    if not specs or any(
        type(spec) is not tf.TensorSpec or spec.dtype in (tf.resource, tf.variant)
        for spec in specs
    ):
        raise Undivided(f"its {what} hold more than dense tensors")
    return specs


def map_function(dataset: Dataset, *, may_draw: bool) -> MapFunction:
    """The function of a ``map``. Raises Undivided if all ranks must call it.

    ``may_draw``: it may draw random numbers from states, the same for any element.
    """
    if not tf_datasets.keeps_order(dataset):
        raise Undivided("map() may change the order (deterministic=False)")
    dense_specs(dataset, "elements")
    concrete = tf_datasets.map_function_of(dataset)
    function = None if concrete is None else function_named(concrete.name.decode())
    if concrete is None or function is None:
        raise Undivided("the function of map() cannot be read")
    draws_alike = may_draw and _draws_alike(concrete, function)
    for node in _ops(function):
        if node.op in WITH_STATE and draws_alike:
            continue
        if (reason := _why_unsafe(node.op)) is not None:
            raise Undivided(f"the function of map() {reason}")
    if any(tensor.dtype == tf.variant for tensor in concrete.captured_inputs):
        raise Undivided("the function of map() reads another dataset")
    handles = [t for t in concrete.captured_inputs if t.dtype == tf.resource]
    tables = _static_tables(handles)
    if any(id(handle) not in tables for handle in handles):
        raise Undivided("the function of map() reads a variable or a mutable table")
    return MapFunction(concrete, function)


def _ops(function: Function) -> list[ProtocolBuffer]:
    """All nodes of a function, but for calls of others, whose nodes are among them."""
    return [
        node for node in all_nodes(function) if not tf_functions.is_function(node.op)
    ]


def draws(function: ConcreteFunction) -> list[Operation]:
    """The ops of a function that draw random numbers from states."""
    operations = function.graph.get_operations()
    return [op for op in operations if op.type in WITH_STATE]


def _draws_alike(concrete: ConcreteFunction, function: Function) -> bool:
    """Whether a function draws the same numbers whatever the element is."""
    todo = draws(concrete)
    if len(todo) != sum(node.op in WITH_STATE for node in _ops(function)):
        return False
    seen = set(todo)
    while todo:
        op = todo.pop()
        if op.type == "Placeholder" or not (
            op.type in WITH_STATE or _why_unsafe(op.type) is None
        ):
            return False
        sources = {*(tensor.op for tensor in op.inputs), *op.control_inputs} - seen
        seen |= sources
        todo += sources
    return True


def _why_unsafe(op_type: str) -> str | None:
    """Why what a function returns may depend on more than the element."""
    if op_type in _PYTHON:
        return "calls Python (py_function or numpy_function)"
    definition = tf_functions.op_def(op_type)
    if definition is None:
        return f"has the op {op_type}, which is not known"
    if "Dataset" in op_type or "Iterator" in op_type:
        return f"reads another dataset ({op_type})"
    if not definition.is_stateful or op_type in _WITHOUT_EFFECT | _LOOKUPS:
        return None
    if is_draw(op_type) or op_type.startswith("Random"):
        return (
            f"draws random numbers from a state ({op_type}) in a branch or a loop, or "
            "of a shape that depends on the element: draw them before, or use "
            "tf.random.stateless_* or tf.image.stateless_*, with seeds from the dataset"
        )
    if "Variable" in op_type or op_type.startswith(("Rng", "VarHandle")):
        return f"uses a variable ({op_type})"
    return f"has an effect or a state ({op_type})"


_tables: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The tables found so far, by the ``id`` of their handles, which they keep alive."""


def _static_tables(handles: Sequence[Tensor]) -> Mapping[int, Any]:
    """Tables that do not change, by the ``id`` of their handles.

    Among them are those of ``handles``, as far as these belong to such tables.
    """
    if any(id(handle) not in _tables for handle in handles):
        # Not isinstance: it may call code of objects that stand for others.
        for table in gc.get_objects():
            if issubclass(type(table), tf.lookup.StaticHashTable):
                _tables[id(table.resource_handle)] = table
    return _tables


_CHEAP = frozenset(
    (
        *("Placeholder", "Const", "Identity", "IdentityN", "NoOp", "Cast", "Bitcast"),
        *("Reshape", "ExpandDims", "Squeeze", "Shape", "Size", "Rank", "Transpose"),
        *("Pack", "Unpack", "Concat", "ConcatV2", "StridedSlice", "Slice", "GatherV2"),
        *("Split", "SplitV", "Fill", "Range", "ZerosLike", "OnesLike", "OneHot"),
        *("Add", "AddV2", "Sub", "Mul", "RealDiv", "Div", "DivNoNan", "FloorDiv"),
        *("FloorMod", "Neg", "Abs", "Square", "Sqrt", "Maximum", "Minimum", "Pow"),
        *("Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual"),
        *("LogicalAnd", "LogicalOr", "LogicalNot", "Select", "SelectV2", "EnsureShape"),
        *("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "ArgMax", "BroadcastTo"),
        *("StopGradient", "Assert", *CALLS, *_LOOKUPS),
    )
)
"""Ops that take less time than to divide a pipeline, if their tensors are small."""
_SMALL = 1 << 14
"""The most numbers of a small tensor."""


def is_costly(function: MapFunction) -> bool:
    """Whether to call a function for fewer elements is worth dividing the pipeline."""
    nodes = _ops(function.definition)
    if any(node.op not in _CHEAP | WITH_STATE for node in nodes):
        return True
    shapes = [
        tf.TensorShape(shape)
        for node in nodes
        for shape in node.attr["_output_shapes"].list.shape
        if "_output_shapes" in node.attr
    ]
    return any(
        shape.rank is not None and (elements_of(shape.as_list()) or 0) > _SMALL
        for shape in shapes
    )


# --- what the ranks must have in common -----------------------------------------------


def digest(functions: Sequence[MapFunction]) -> int:
    """A checksum of functions and of the tensors that they have captured, 32 bits."""
    checksum = 0
    for function in functions:
        for node in _ops(function.definition):
            checksum = zlib.crc32(node.op.encode(), checksum)
            for name, attribute in sorted(node.attr.items()):
                # The names of functions have numbers that ranks may not share.
                is_name = attribute.HasField("func") or attribute.list.func
                if is_name or name.startswith("_"):
                    continue
                data = attribute.SerializeToString(deterministic=True)
                checksum = zlib.crc32(name.encode() + data, checksum)
    captured = [t for function in functions for t in function.concrete.captured_inputs]
    tables = _static_tables([t for t in captured if t.dtype == tf.resource])
    for tensor in captured:
        is_table = tensor.dtype == tf.resource
        data = _of_table(tables[id(tensor)]) if is_table else _bytes(np.asarray(tensor))
        checksum = zlib.crc32(data, checksum)
    return checksum


def reads_files(functions: Sequence[MapFunction]) -> bool:
    """Whether results depend on files, too, which ranks may have different ones of."""
    definitions = (function.definition for function in functions)
    return any(node.op == "ReadFile" for each in definitions for node in _ops(each))


def _of_table(table: Any) -> bytes:
    """The keys and values of a table, in an order that ranks share."""
    keys, values = (np.asarray(tensor) for tensor in table.export())
    order = np.argsort(keys)
    return _bytes(keys[order]) + _bytes(values[order])


def _bytes(array: Array) -> bytes:
    is_text = array.dtype == object
    return repr(array.tolist()).encode() if is_text else array.tobytes()
