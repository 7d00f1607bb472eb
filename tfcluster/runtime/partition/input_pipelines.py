"""Which ``tf.data`` pipelines the ranks can divide, and why they cannot divide others.

A pipeline is divided where it applies functions to single elements before ``batch``: a
rank applies them to the elements of its own rows. All that comes before is computed
whole by every rank, so that order and random numbers are those of one machine. Stages
that only count, join or reorder elements are moved before the functions, whose results
they do not change.

Functions of batches are divided like those of a step: by rules, as far as the rows of a
rank depend on no others.

Random numbers that a function draws from a state are drawn by every rank for all
elements, which they become a part of; the rest of the function is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import tensorflow as tf

from tfcluster.runtime import tf_internals
from tfcluster.runtime.partition import tf_datasets
from tfcluster.runtime.partition.input_functions import (
    MapFunction,
    Undivided,
    dense_specs,
    digest,
    draws,
    is_costly,
    map_function,
    reads_files,
)
from tfcluster.runtime.partition.placement import Split
from tfcluster.runtime.partition.row_functions import RowFunction, row_function
from tfcluster.runtime.tensor_types import (
    ConcreteFunction,
    Dataset,
    Nest,
    ProtocolBuffer,
    Tensor,
)

_BATCHES = ("Batch", "ParallelBatch")
_MAPS = ("Map", "ParallelMap")
_ORDER = ("AssertCardinality", "Repeat", "Shuffle", "Skip", "Take")
"""Stages that count, leave out, repeat or reorder elements, whatever these are."""
NO_BATCHES = "it does not call batch()"
_TRANSPARENT = ("Options", "Prefetch")
"""Stages that pass on the elements."""


@dataclass(frozen=True, slots=True)
class ElementMap:
    """A ``map`` that is divided. Its function gets and returns flat tensors."""

    function: ConcreteFunction
    first: int
    """The number of its first tensor among those of an element."""
    arguments: int
    """How many tensors it gets: some of an element's, then those that it draws."""
    results: int
    """How many tensors it returns, which take their place."""
    parallel_calls: int | None


@dataclass(frozen=True, slots=True)
class BatchMap:
    """A ``map`` of batches that is divided."""

    whole: ConcreteFunction
    own: RowFunction
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
    batch_stages: Sequence[BatchMap | Dataset]
    """The stages after ``batch``, in order."""
    digest: int
    """A checksum of the functions and of the tensors that they have captured, 32 bits.
    """
    reads_files: bool
    """Whether results depend on files, too, which ranks may have different ones of."""


def divided(dataset: Dataset, split: Split) -> BatchPipeline | str:
    """How a rank reads its rows of a dataset of batches, or why it does not."""
    if not isinstance(dataset, tf.data.Dataset):
        return f"it is a {type(dataset).__name__}"  # of a strategy with one replica
    try:
        return _divided(dataset, split)
    except Undivided as reason:
        return str(reason)


def with_stage(stage: Dataset, dataset: Dataset) -> Dataset:
    """``dataset`` with a last stage like that of ``stage``."""
    kind = tf_internals.kind_of(stage)
    if kind == "Prefetch":
        return dataset.prefetch(tf_datasets.buffer_size_of(stage))
    if kind == "Shuffle":
        return tf_datasets.shuffled_like(stage, dataset)
    if kind == "AssertCardinality":
        cardinality = int(stage.cardinality())
        return dataset.apply(tf.data.experimental.assert_cardinality(cardinality))
    count = tf_datasets.count_of(stage)
    if kind == "Repeat":
        return dataset.repeat(count)
    return dataset.skip(count) if kind == "Skip" else dataset.take(count)


def _divided(whole: Dataset, split: Split) -> BatchPipeline:
    if whole.options().deterministic is False:
        raise Undivided("its options allow any order (deterministic = False)")
    after, dataset = [], whole
    while (kind := tf_internals.kind_of(dataset)) not in _BATCHES:
        if kind not in (*_MAPS, *_ORDER, *_TRANSPARENT):
            raise Undivided(_why_batches_are_whole(dataset))
        if kind == "Shuffle":
            _require_seeds(dataset)
        if kind != "Options":
            after.append(dataset)
        inputs = tf_internals.inputs_of(dataset)
        if not inputs:
            raise Undivided(NO_BATCHES)
        (dataset,) = inputs
    batch = dataset
    size, drops_remainder = tf_datasets.batch_size_of(batch)
    if size < split.size:
        raise Undivided("a batch has fewer rows than there are ranks")
    if not tf_datasets.keeps_order(batch):
        raise Undivided("batch() may change the order (deterministic=False)")
    (inner,) = tf_internals.inputs_of(batch)
    dense_specs(batch, "batches")
    if any(spec.dtype == tf.string for spec in dense_specs(whole, "batches")):
        raise Undivided("its batches hold strings")
    reasons: list[str] = []
    elements = _Elements.of(inner, reasons)
    of_batches = {
        stage: _function_of_batches(stage)
        for stage in reversed(after)
        if tf_internals.kind_of(stage) in _MAPS
    }
    functions = [*elements.functions, *of_batches.values()]
    if not any(map(is_costly, functions)):
        too_little = "too little is computed before batch() to be worth it"
        raise Undivided(next(iter(reasons), too_little))
    if any(map(_has_own_state, _stages(elements.source))):
        raise Undivided("shuffle_and_repeat() keeps its state to itself")
    specs = dense_specs(elements.source, "elements before map()")
    if not elements.stages and any(spec.shape.rank is None for spec in specs):
        raise Undivided("its elements may have any number of dimensions")
    return BatchPipeline(
        whole=whole,
        source=elements.source,
        maps=elements.stages,
        batch_size=size,
        drops_remainder=drops_remainder,
        parallel_batches=tf_datasets.parallel_calls_of(batch),
        batch_stages=_divided_stages(after[::-1], of_batches, batch, size, split),
        digest=digest(functions),
        reads_files=reads_files(functions),
    )


def _require_seeds(shuffle: Dataset) -> None:
    try:
        tf_datasets.seed_generator_of(shuffle)
    except ValueError as error:
        raise Undivided(f"shuffle(...) comes after batch(): {error}") from error


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
    return f"{kind.lower()}(...) comes after batch()"


def _stages(dataset: Dataset) -> Iterator[Dataset]:
    yield dataset
    for source in tf_internals.inputs_of(dataset):
        yield from _stages(source)


def _has_own_state(stage: Dataset) -> bool:
    """Whether its next pass depends on the last one, which other datasets do not see.

    Others share a state by its handle.
    """
    return tf_internals.kind_of(stage) == "ShuffleAndRepeat"


# --- functions of batches -------------------------------------------------------------


def _function_of_batches(stage: Dataset) -> MapFunction:
    try:
        return map_function(stage, may_draw=False)
    except Undivided as reason:
        raise Undivided(f"it maps whole batches, and {reason}") from None


def _divided_stages(
    stages: Sequence[Dataset],
    functions: Mapping[Dataset, MapFunction],
    batch: Dataset,
    size: int,
    split: Split,
) -> list[BatchMap | Dataset]:
    """The stages after ``batch``, with divided functions."""
    specs = tf.nest.flatten(batch.element_spec)
    shapes = [(size, *spec.shape[1:]) for spec in specs]
    divided_stages: list[BatchMap | Dataset] = []
    for stage in stages:
        function = functions.get(stage)
        if function is None:
            divided_stages.append(stage)
            continue
        own, shapes = row_function(function, shapes, split)
        parallel_calls = tf_datasets.parallel_calls_of(stage)
        divided_stages.append(BatchMap(function.concrete, own, parallel_calls))
    return divided_stages


# --- functions of elements ------------------------------------------------------------


@dataclass(slots=True)
class _Elements:
    """A dataset as a source, and the divided functions of its elements."""

    source: Dataset
    stages: list[ElementMap | Dataset] = field(default_factory=list)
    functions: list[MapFunction] = field(default_factory=list)
    results: int = 0
    """How many tensors an element has after the functions."""

    @property
    def is_costly(self) -> bool:
        """Whether it is worth dividing the functions."""
        return any(map(is_costly, self.functions))

    @classmethod
    def of(cls, dataset: Dataset, reasons: list[str]) -> _Elements:
        """All functions are divided after which there is nothing that needs results.

        ``reasons`` gets why others are not divided.
        """
        kind, inputs = tf_internals.kind_of(dataset), tf_internals.inputs_of(dataset)
        whole = cls(dataset, results=len(tf.nest.flatten(dataset.element_spec)))
        if kind in _MAPS:
            try:
                function = map_function(dataset, may_draw=True)
                return cls.of(inputs[0], reasons).with_map(dataset, function)
            except Undivided as reason:
                reasons.append(str(reason))
            return whole
        if kind == "Zip":
            return cls.joined(whole, [cls.of(each, reasons) for each in inputs])
        if kind not in (*_ORDER, *_TRANSPARENT):
            if len(inputs) == 1:
                reasons.append(f"{kind.lower()}(...) comes between map() and batch()")
            return whole
        below = cls.of(inputs[0], reasons)
        if not below.is_costly:
            return whole
        if kind == "Prefetch":
            below.stages.append(dataset)
        elif kind != "Options":
            try:
                below.source = with_stage(dataset, below.source)
            except ValueError as error:
                reasons.append(f"{kind.lower()}(...) comes after map(): {error}")
                return whole
        return below

    def with_map(self, dataset: Dataset, function: MapFunction) -> _Elements:
        """The elements after a ``map`` with this function."""
        try:
            drawing, element_map = _drawing_apart(dataset, function)
        except (ValueError, TypeError, NotImplementedError) as error:
            said = f"the function of map() cannot be rewritten: {error}"
            raise Undivided(said) from error
        if drawing is not None:
            self.source = self.source.map(_with_draws(drawing))
        self.stages.append(element_map)
        self.functions.append(function)
        self.results = element_map.results
        return self

    @classmethod
    def joined(cls, whole: _Elements, parts: Sequence[_Elements]) -> _Elements:
        """The elements of ``zip``, whose functions get the tensors of one part."""
        if not any(part.is_costly for part in parts):
            return whole
        joined = cls(tf.data.Dataset.zip(tuple(part.source for part in parts)))
        for part in parts:
            joined.stages += [
                replace(stage, first=joined.results + stage.first)
                if isinstance(stage, ElementMap)
                else stage
                for stage in part.stages
            ]
            joined.functions += part.functions
            joined.results += part.results
        return joined


def _drawing_apart(
    dataset: Dataset, function: MapFunction
) -> tuple[ConcreteFunction | None, ElementMap]:
    """What the function of a ``map`` draws from states, and the rest of it.

    The same ops with the same seeds draw the same numbers in another function.
    """
    whole, count = function.concrete, function.arguments
    results = len(tf.nest.flatten(dataset.element_spec))
    parallel_calls = tf_datasets.parallel_calls_of(dataset)
    drawn = [tensor for op in draws(whole) for tensor in op.outputs]
    captured = whole.captured_inputs
    own, closed_over = whole.inputs[:count], whole.inputs[count:]
    if not drawn:
        return None, ElementMap(whole, 0, count, results, parallel_calls)
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
    return alone, ElementMap(without, 0, len(specs), results, parallel_calls)


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
