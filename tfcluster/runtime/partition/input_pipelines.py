"""Which ``tf.data`` pipelines the ranks can divide, and why they cannot divide others.

A pipeline is divided where it applies functions to single elements before ``batch``:
a rank applies them to the elements of its own rows. All that comes before is computed
whole by every rank, so that order and random numbers are those of one machine.

A function may be divided if what it returns depends on the element alone. Then it does
not matter either whether elements are left out or repeated before or after it. Random
numbers that it draws from a state are drawn by every rank for all elements, which they
become a part of; the rest of the function is divided.
"""

from __future__ import annotations

import gc
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime import tf_internals
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
    Nest,
    Operation,
    ProtocolBuffer,
    Tensor,
)

_BATCHES = ("Batch", "ParallelBatch")
_MAPS = ("Map", "ParallelMap")
_COUNTS = ("AssertCardinality", "Repeat", "Skip", "Take")
"""Stages that count, leave out or repeat elements, whatever these are."""
NO_BATCHES = "it does not call batch()"
_TRANSPARENT = ("Options", "Prefetch")
"""Stages that pass on the elements."""


@dataclass(frozen=True, slots=True)
class ElementMap:
    """A ``map`` that is divided. Its function gets and returns flat tensors."""

    function: ConcreteFunction
    arguments: int
    """How many tensors it gets: those of an element, then those that it draws."""
    results: int
    """How many tensors it returns."""
    parallel_calls: int | None


@dataclass(frozen=True, slots=True)
class BatchPipeline:
    """A dataset of batches that ranks divide."""

    whole: Dataset
    """The dataset itself."""
    source: Dataset
    """What every rank reads whole: the elements before the divided functions.

    After their own tensors follow those that the functions draw, in order.
    """
    maps: Sequence[ElementMap | Dataset]
    """The divided functions, in order. Among them are datasets that prefetch."""
    batch_size: int
    drops_remainder: bool
    parallel_batches: int | None
    """``num_parallel_calls`` of ``batch``."""
    batch_stages: Sequence[Dataset]
    """The stages after ``batch``, in order; see ``with_stage``."""
    digest: int
    """A checksum of the functions and of the tensors that they have captured, 32 bits.
    """
    reads_files: bool
    """Whether results depend on files, too, which ranks may have different ones of."""


class _Undivided(Exception):
    """Why a pipeline is not divided."""


def divided(dataset: Dataset, ranks: int) -> BatchPipeline | str:
    """How ``ranks`` ranks divide a dataset of batches, or why they do not."""
    if not isinstance(dataset, tf.data.Dataset):
        return f"it is a {type(dataset).__name__}"  # of a strategy with one replica
    try:
        return _divided(dataset, ranks)
    except _Undivided as reason:
        return str(reason)


def with_stage(stage: Dataset, dataset: Dataset) -> Dataset:
    """``dataset`` with a last stage like that of ``stage``."""
    kind = tf_internals.kind_of(stage)
    if kind == "Prefetch":
        return dataset.prefetch(tf_datasets.buffer_size_of(stage))
    if kind == "AssertCardinality":
        cardinality = int(stage.cardinality())
        return dataset.apply(tf.data.experimental.assert_cardinality(cardinality))
    count = tf_datasets.count_of(stage)
    if kind == "Repeat":
        return dataset.repeat(count)
    return dataset.skip(count) if kind == "Skip" else dataset.take(count)


def _divided(whole: Dataset, ranks: int) -> BatchPipeline:
    if whole.options().deterministic is False:
        raise _Undivided("its options allow any order (deterministic = False)")
    dataset, batch_stages = whole, []
    while (kind := tf_internals.kind_of(dataset)) not in _BATCHES:
        if kind not in _COUNTS and kind not in _TRANSPARENT:
            raise _Undivided(_why_batches_are_whole(dataset))
        if kind != "Options":
            batch_stages.append(dataset)
        (dataset,) = tf_internals.inputs_of(dataset)
    batch = dataset
    size, drops_remainder = tf_datasets.batch_size_of(batch)
    if size < ranks:
        raise _Undivided("a batch has fewer rows than there are ranks")
    if not tf_datasets.keeps_order(batch):
        raise _Undivided("batch() may change the order (deterministic=False)")
    (elements,) = tf_internals.inputs_of(batch)
    if any(spec.dtype == tf.string for spec in _specs(elements, "batches")):
        raise _Undivided("its batches hold strings")
    source, stages, functions, captured = _walk(elements)
    return BatchPipeline(
        whole=whole,
        source=source,
        maps=stages,
        batch_size=size,
        drops_remainder=drops_remainder,
        parallel_batches=tf_datasets.parallel_calls_of(batch),
        batch_stages=batch_stages[::-1],
        digest=_digest(functions, captured),
        reads_files=any(
            node.op == "ReadFile" for function in functions for node in _ops(function)
        ),
    )


def _why_batches_are_whole(stage: Dataset) -> str:
    """Why a stage that yields batches, or comes after ``batch``, needs whole ones."""
    kind, dataset = tf_internals.kind_of(stage), stage
    while tf_internals.kind_of(dataset) not in tf_internals.BATCHES:
        inputs = tf_internals.inputs_of(dataset)
        if len(inputs) != 1:
            return NO_BATCHES
        (dataset,) = inputs
    if dataset is stage:
        return f"what {kind.lower()}(...) returns depends on all rows of a batch"
    if kind in _MAPS:
        return "it maps whole batches: call map() before batch()"
    return f"{kind.lower()}(...) comes after batch()"


def _walk(
    elements: Dataset,
) -> tuple[Dataset, list[ElementMap | Dataset], list[Function], list[Tensor]]:
    """The source, the stages between it and ``elements``; what the maps depend on.

    That is their functions, and the tensors that these have captured.
    """
    between: list[Dataset] = []
    """The stages that follow the first divided map, and that map, the last one first.
    """
    functions: dict[Dataset, Function] = {}
    dataset, source, length = elements, elements, 0
    reason = None
    while len(inputs := tf_internals.inputs_of(dataset)) == 1:
        kind = tf_internals.kind_of(dataset)
        if kind in _MAPS:
            try:
                functions[dataset] = _function_of(dataset)
            except _Undivided as undivided:
                reason = str(undivided)
                break
        elif kind not in _COUNTS and kind not in _TRANSPARENT:
            if not functions:
                reason = f"{kind.lower()}(...) comes between map() and batch()"
            break
        if kind != "Options":
            between.append(dataset)
        (dataset,) = inputs
        if kind in _MAPS:
            source, length = dataset, len(between)
    if not any(map(_is_costly, functions.values())):
        too_little = "too little is computed before batch() to be worth it"
        raise _Undivided(reason or too_little)
    _specs(source, "elements before map()")
    stages: list[ElementMap | Dataset] = []
    captured: list[Tensor] = []
    for stage in reversed(between[:length]):
        if stage in functions:
            function = tf_datasets.map_function_of(stage)
            assert function is not None
            captured += function.captured_inputs
            try:
                drawing, element_map = _drawing_apart(stage, function)
            except (ValueError, TypeError, NotImplementedError) as error:
                said = f"the function of map() cannot be rewritten: {error}"
                raise _Undivided(said) from error
            stages.append(element_map)
            if drawing is not None:
                source = source.map(_with_draws(drawing))
        elif tf_internals.kind_of(stage) == "Prefetch":
            stages.append(stage)
        else:
            source = with_stage(stage, source)
    return source, stages, list(functions.values()), captured


def _drawing_apart(
    dataset: Dataset, whole: ConcreteFunction
) -> tuple[ConcreteFunction | None, ElementMap]:
    """What the function of a ``map`` draws from states, and the rest of it.

    The same ops with the same seeds draw the same numbers in another function.
    """
    results = len(tf.nest.flatten(dataset.element_spec))
    parallel_calls = tf_datasets.parallel_calls_of(dataset)
    drawn = [tensor for op in _draws(whole) for tensor in op.outputs]
    captured = whole.captured_inputs
    count = len(whole.inputs) - len(captured)
    own, closed_over = whole.inputs[:count], whole.inputs[count:]
    if not drawn:
        return None, ElementMap(whole, count, results, parallel_calls)
    graph = whole.graph.as_graph_def()

    def drawing() -> list[Tensor]:
        return _copied(graph, {}, drawn, only_needed=True)

    def rest(*tensors: Tensor) -> list[Tensor]:
        places = [tensor.name for tensor in (*own, *drawn, *closed_over)]
        # The nodes of a graph cannot read tensors from outside of it.
        inside = map(tf.compat.v1.get_default_graph().capture, captured)
        inputs = dict(zip(places, [*tensors, *inside], strict=True))
        return _copied(graph, inputs, whole.outputs)

    specs = [tf.TensorSpec.from_tensor(tensor) for tensor in (*own, *drawn)]
    alone = tf.function(drawing, autograph=False).get_concrete_function()
    without = tf.function(rest, autograph=False).get_concrete_function(*specs)
    return alone, ElementMap(without, len(specs), results, parallel_calls)


def _copied(
    graph: ProtocolBuffer,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[Tensor],
    *,
    only_needed: bool = False,
) -> list[Tensor]:
    """Outputs of a graph whose nodes are added to the current graph.

    ``inputs`` take the places of tensors with these names. Nodes that the outputs do
    not need are added as well, such as assertions, unless ``only_needed``.
    """
    names = [tensor.name for tensor in outputs]
    needed = list(dict.fromkeys(name for name in names if name not in inputs))
    replaced = set(map(_node_of, inputs))
    nodes = {node.name: node for node in graph.node if node.name not in replaced}
    todo = [_node_of(name) for name in needed] if only_needed else list(nodes)
    kept: dict[str, ProtocolBuffer] = {}
    while todo:
        name = todo.pop()
        if name not in kept and name in nodes:
            copy = kept[name] = tf.compat.v1.NodeDef()
            copy.CopyFrom(nodes[name])
            # It may be that of a node that is replaced, and all run on the CPU.
            copy.attr.pop("_class", None)
            # What is there already need not be waited for.
            copy.input[:] = [
                text
                for text in copy.input
                if text[0] != "^" or _node_of(text) not in replaced
            ]
            todo += map(_node_of, copy.input)
    texts = {text for node in kept.values() for text in node.input}
    used = {text if ":" in text else f"{text}:0" for text in texts}
    definition = tf.compat.v1.GraphDef(
        node=kept.values(), versions=graph.versions, library=graph.library
    )
    mapped = {name: value for name, value in inputs.items() if name in used}
    found = tf.graph_util.import_graph_def(definition, mapped, needed, name="copied")
    values = {**inputs, **dict(zip(needed, found, strict=True))}
    return [tf.identity(values[name]) for name in names]


def _node_of(text: str) -> str:
    """The name of the node that a node's input refers to."""
    return text.removeprefix("^").partition(":")[0]


def _with_draws(drawing: ConcreteFunction) -> Callable[..., Nest]:
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def with_draws(*element: Nest) -> Nest:
        return (*tf.nest.flatten(element), *drawing())

    function: Callable[..., Nest] = with_draws
    return function


def _specs(dataset: Dataset, what: str) -> Sequence[tf.TensorSpec]:
    specs: Sequence[tf.TensorSpec] = tf.nest.flatten(dataset.element_spec)
    if not specs or any(
        type(spec) is not tf.TensorSpec or spec.dtype in (tf.resource, tf.variant)
        for spec in specs
    ):
        raise _Undivided(f"its {what} hold more than dense tensors")
    return specs


# --- functions ------------------------------------------------------------------------


_PYTHON = frozenset(("EagerPyFunc", "PyFunc", "PyFuncStateless"))
_WITHOUT_EFFECT = frozenset((*CALLS, *LOOPS, *BRANCHES, "Assert", "NoOp"))
"""Ops that TensorFlow calls stateful, though they depend on their inputs alone."""
_LOOKUPS = frozenset(
    f"LookupTable{name}{version}" for name in ("Find", "Size") for version in ("", "V2")
)


def _ops(function: Function) -> list[ProtocolBuffer]:
    """All nodes of a function, but for calls of others, whose nodes are among them."""
    return [
        node for node in all_nodes(function) if not tf_functions.is_function(node.op)
    ]


def _function_of(dataset: Dataset) -> Function:
    """The function of a ``map``. Raises _Undivided if all ranks must call it."""
    if not tf_datasets.keeps_order(dataset):
        raise _Undivided("map() may change the order (deterministic=False)")
    _specs(dataset, "elements")
    concrete = tf_datasets.map_function_of(dataset)
    function = None if concrete is None else function_named(concrete.name.decode())
    if concrete is None or function is None:
        raise _Undivided("the function of map() cannot be read")
    draws_alike = _draws_alike(concrete, function)
    for node in _ops(function):
        if node.op in WITH_STATE and draws_alike:
            continue
        if (reason := _why_unsafe(node.op)) is not None:
            raise _Undivided(f"the function of map() {reason}")
    if any(tensor.dtype == tf.variant for tensor in concrete.captured_inputs):
        raise _Undivided("the function of map() reads another dataset")
    handles = [t for t in concrete.captured_inputs if t.dtype == tf.resource]
    tables = _static_tables(handles)
    if any(id(handle) not in tables for handle in handles):
        raise _Undivided("the function of map() reads a variable or a mutable table")
    return function


def _draws(function: ConcreteFunction) -> list[Operation]:
    operations = function.graph.get_operations()
    return [op for op in operations if op.type in WITH_STATE]


def _draws_alike(concrete: ConcreteFunction, function: Function) -> bool:
    """Whether a function draws the same numbers whatever the element is."""
    todo = _draws(concrete)
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


def _is_costly(function: Function) -> bool:
    """Whether to call a function for fewer elements is worth dividing the pipeline."""
    if any(node.op not in _CHEAP | WITH_STATE for node in _ops(function)):
        return True
    shapes = [
        tf.TensorShape(shape)
        for node in _ops(function)
        for shape in node.attr["_output_shapes"].list.shape
        if "_output_shapes" in node.attr
    ]
    return any(
        shape.rank is not None and (elements_of(shape.as_list()) or 0) > _SMALL
        for shape in shapes
    )


# --- what the ranks must have in common -----------------------------------------------


def _digest(functions: Sequence[Function], captured: Sequence[Tensor]) -> int:
    checksum = 0
    for function in functions:
        for node in _ops(function):
            checksum = zlib.crc32(node.op.encode(), checksum)
            for name, attribute in sorted(node.attr.items()):
                # The names of functions have numbers that ranks may not share.
                is_name = attribute.HasField("func") or attribute.list.func
                if is_name or name.startswith("_"):
                    continue
                data = attribute.SerializeToString(deterministic=True)
                checksum = zlib.crc32(name.encode() + data, checksum)
    tables = _static_tables([t for t in captured if t.dtype == tf.resource])
    for tensor in captured:
        is_table = tensor.dtype == tf.resource
        data = _of_table(tables[id(tensor)]) if is_table else _bytes(np.asarray(tensor))
        checksum = zlib.crc32(data, checksum)
    return checksum


def _of_table(table: Any) -> bytes:
    """The keys and values of a table, in an order that ranks share."""
    keys, values = (np.asarray(tensor) for tensor in table.export())
    order = np.argsort(keys)
    return _bytes(keys[order]) + _bytes(values[order])


def _bytes(array: Array) -> bytes:
    is_text = array.dtype == object
    return repr(array.tolist()).encode() if is_text else array.tobytes()
