"""Ragged tensors between strings and dense rows of a fixed length, as one op.

``tf.strings.split`` makes as many entries of each string as it likes, so no placement
says which entries a rank has. But entries are often only looked up or compared, each by
itself, before they become rows of a fixed length again: then a row of the result
depends on one string. The nodes between become one call of a function, which a rank
makes for its own strings (``rules.strings``).

Each value between is a ``RaggedPart``, by rules for the ops that make it. A rank's part
is what the ops compute of the rank's strings.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import tensorflow as tf

from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.graph import Node, Value, python_value
from tfcluster.runtime.partition.placement import Shape
from tfcluster.runtime.partition.rules.elementwise import ELEMENTWISE
from tfcluster.runtime.partition.rules.strings import (
    ELEMENTWISE_OF_STRINGS,
    RAGGED_ROWS,
)
from tfcluster.runtime.partition.shape_graph import Path, ShapeGraph
from tfcluster.runtime.partition.writer import (
    FunctionName,
    OpWriter,
    Ref,
    set_attribute,
)
from tfcluster.runtime.tensor_types import ProtocolBuffer

TO_DENSE = ("RaggedBincount", "RaggedTensorToTensor")
"""Ops that make dense rows."""
_SPLIT = "StringSplitV2"
_NGRAMS = "StringNGrams"
_EACH_BY_ITSELF = frozenset(
    (
        *ELEMENTWISE,
        *ELEMENTWISE_OF_STRINGS,
        *("AddV2", "Cast", "EnsureShape", "Identity", "Mul", "Neg", "RegexReplace"),
        *("LookupTableFind", "LookupTableFindV2", "Sub"),
    )
)
"""Ops whose result for an entry depends on this entry and on scalars only."""
_COPIES = ("Cast", "Identity", "Reshape")


class RaggedRole(enum.Enum):
    """What a value is for strings, each of which has some entries."""

    ENTRIES = "one for each entry"
    ROW_NUMBERS = "for each entry, the number of its string"
    COUNT = "the number of strings"
    LENGTHS = "for each string, how many entries it has"
    ENDS = "the sums of lengths up to each string"
    SPLITS = "a zero, and these sums"


class RaggedPart(NamedTuple):
    """The role of a value, and the node that has made the entries."""

    role: RaggedRole
    source: Node


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """A function that gets strings, and what else its nodes need."""

    name: str
    inputs: Sequence[Value]
    """The first are the strings."""
    shape: Shape
    """That of its result, which has a row for each string."""
    nodes: Sequence[Node]
    """The nodes of the graph that it computes instead."""

    def added_to(
        self,
        graph: ShapeGraph,
        types: Sequence[int],
        controls: Iterable[Node],
        path: Path,
    ) -> list[Node]:
        """A call of it, which waits for what its nodes wait for, and its result.

        Who waits for one of its nodes will wait for the call.
        """
        results = [tf_functions.dtype_of(number) for number in types]
        values: Mapping[str, object] = {
            "f": FunctionName(self.name),
            "Tin": [value.dtype for value in self.inputs],
            "Tout": results,
        }
        attributes = {name: tf.compat.v1.AttrValue() for name in values}
        for name, value in values.items():
            set_attribute(attributes[name], value)
        own = set(self.nodes)
        waits = [each for node in self.nodes for each in node.controls]
        call = graph.add(
            "PartitionedCall",
            self.inputs,
            [*controls, *(each for each in waits if each not in own)],
            attributes,
            results,
            path[-1],
            origin=path,
        )
        graph.instead |= dict.fromkeys(self.nodes, call)
        return [call, graph.ensure_shape(call.outputs[0], self.shape, path[-1])]


def ragged_rows(
    op_type: str, attributes: Mapping[str, ProtocolBuffer], inputs: Sequence[Value]
) -> RaggedRows | None:
    """The function that ends with one of ``TO_DENSE`` with these inputs.

    None if its result cannot be computed for some strings by themselves.
    """
    parts = _Parts()
    if op_type == "RaggedBincount":
        columns = _columns_of_counts(parts, inputs)
    else:
        kinds = python_value(attributes["row_partition_types"])
        columns = _columns_of_padded(parts, kinds, inputs)
    source = parts.source_of_entries(inputs[1])
    while source is not None and source.type == _NGRAMS:
        source = parts.source_of_entries(source.inputs[0])
    if columns is None or source is None:
        return None
    strings, separator = source.inputs
    if strings.shape is None or len(strings.shape) != 1 or separator.shape != ():
        return None
    body = _Body(parts)
    body.ref(strings)  # The first argument.
    refs = [body.ref(parts.clamped(value)) for value in inputs]
    result = body.writer.node(op_type, refs, attributes, op_type)
    name = _registered(body.writer.finish(result, ()))
    shape = (strings.shape[0], columns)
    return RaggedRows(name, body.arguments, shape, body.nodes)


def _columns_of_padded(
    parts: _Parts, kinds: Sequence[bytes], inputs: Sequence[Value]
) -> int | None:
    """The columns of a ``RaggedTensorToTensor`` of entries that can be divided."""
    shape, entries, default, *partition = inputs
    sizes, source = shape.constant, parts.source_of_entries(entries)
    if sizes is None or sizes.shape != (2,) or sizes[0] >= 0 or sizes[1] < 0:
        return None
    roles = {
        (b"FIRST_DIM_SIZE", b"VALUE_ROWIDS"): [
            RaggedRole.COUNT,
            RaggedRole.ROW_NUMBERS,
        ],
        (b"ROW_SPLITS",): [RaggedRole.SPLITS],
    }.get(tuple(kinds))
    if source is None or roles is None or default.shape != ():
        return None
    are_parts = all(map(parts.is_part, partition, roles, [source] * len(roles)))
    return int(sizes[1]) if are_parts else None


def _columns_of_counts(parts: _Parts, inputs: Sequence[Value]) -> int | None:
    """The same for a ``RaggedBincount``."""
    splits, entries, size, weights = inputs
    source, columns = parts.source_of_entries(entries), parts.clamped(size).constant
    if source is None or columns is None or weights.shape != (0,):
        return None
    return int(columns) if parts.is_part(splits, RaggedRole.SPLITS, source) else None


# --- parts ----------------------------------------------------------------------------


class _Parts:
    """Says of values what they are."""

    def __init__(self) -> None:
        self._known: dict[Value, RaggedPart | None] = {}
        self._rules: dict[str, Callable[[Value], RaggedPart | None]] = {
            **dict.fromkeys(_COPIES, self._of_copy),
            _SPLIT: self._of_split,
            _NGRAMS: self._of_ngrams,
            "ConcatV2": self._of_joined,
            "Cumsum": self._of_sums,
            "DenseBincount": self._of_lengths,
            "StridedSlice": self._of_slice,
        }

    def of(self, value: Value) -> RaggedPart | None:
        """What a value is; None if no rule says that it depends on strings singly."""
        if value not in self._known:
            rule = self._rules.get(value.node.type)
            part = self._each_by_itself(value)
            if part is None and rule is not None:
                part = rule(value)
            self._known[value] = part
        return self._known[value]

    def is_part(self, value: Value, role: RaggedRole, source: Node) -> bool:
        return self.of(value) == RaggedPart(role, source)

    def source_of_entries(self, value: Value) -> Node | None:
        part = self.of(value)
        return (
            part.source
            if part is not None and part.role is RaggedRole.ENTRIES
            else None
        )

    def clamped(self, value: Value) -> Value:
        """The number that a value is, if it has the same number as least and most."""
        if value.node.type != "Minimum":
            return value
        most, other = value.node.inputs
        if other.node.type != "Maximum" or value.shape != () or most.shape != ():
            return value
        least = other.node.inputs[0]
        if most.constant is not None and least.constant is not None:
            is_same = most.constant.tolist() == least.constant.tolist()
        else:
            part = self.of(most)
            is_count = part is not None and part.role is RaggedRole.COUNT
            is_same = is_count and self.of(least) == part
        return most if is_same else value

    def _each_by_itself(self, value: Value) -> RaggedPart | None:
        node = value.node
        if node.type not in _EACH_BY_ITSELF or value.shape != (None,):
            return None
        each = [v for v in node.inputs if not (v.is_handle or v.shape == ())]
        sources = set(map(self.source_of_entries, each))
        source = sources.pop() if len(sources) == 1 else None
        return None if source is None else RaggedPart(RaggedRole.ENTRIES, source)

    def _of_copy(self, value: Value) -> RaggedPart | None:
        source, *shape = value.node.inputs
        if shape and (shape[0].constant is None or shape[0].constant.tolist() != [-1]):
            return None
        is_same = value.shape is not None and source.shape is not None
        is_same = is_same and len(value.shape or ()) == len(source.shape or ())
        return self.of(source) if is_same else None

    def _of_split(self, value: Value) -> RaggedPart | None:
        return RaggedPart(RaggedRole.ENTRIES, value.node) if value.index == 1 else None

    def _of_ngrams(self, value: Value) -> RaggedPart | None:
        entries, splits = value.node.inputs
        source = self.source_of_entries(entries)
        if source is None or not self.is_part(splits, RaggedRole.SPLITS, source):
            return None
        return RaggedPart(
            (RaggedRole.ENTRIES, RaggedRole.SPLITS)[value.index], value.node
        )

    def _of_slice(self, value: Value) -> RaggedPart | None:
        """The first column of the entries' places, or the number of strings."""
        source = value.node.inputs[0]
        if source.node.type != _SPLIT:
            return None
        if source.index == 0 and _takes(value.node, [None, 0]):
            return RaggedPart(RaggedRole.ROW_NUMBERS, source.node)
        if source.index == 2 and _takes(value.node, [0]):
            return RaggedPart(RaggedRole.COUNT, source.node)
        return None

    def _of_lengths(self, value: Value) -> RaggedPart | None:
        """How often each string's number occurs among the entries'."""
        numbers, size, weights = value.node.inputs
        part = self.of(numbers)
        if (
            part is None
            or part.role is not RaggedRole.ROW_NUMBERS
            or weights.shape != (0,)
        ):
            return None
        is_count = self.is_part(self.clamped(size), RaggedRole.COUNT, part.source)
        if not is_count or value.node.attribute("binary_output"):
            return None
        return RaggedPart(RaggedRole.LENGTHS, part.source)

    def _of_sums(self, value: Value) -> RaggedPart | None:
        node, part = value.node, self.of(value.node.inputs[0])
        is_other = node.attribute("exclusive") or node.attribute("reverse")
        if part is None or part.role is not RaggedRole.LENGTHS or is_other:
            return None
        return RaggedPart(RaggedRole.ENDS, part.source)

    def _of_joined(self, value: Value) -> RaggedPart | None:
        if len(value.node.inputs) != 3:
            return None
        zero, ends, _ = value.node.inputs
        part = self.of(ends)
        if part is None or part.role is not RaggedRole.ENDS or zero.constant is None:
            return None
        is_zero = zero.constant.tolist() == [0]
        return RaggedPart(RaggedRole.SPLITS, part.source) if is_zero else None


def _takes(node: Node, places: Sequence[int | None]) -> bool:
    """Whether a strided slice takes this entry; None: a whole dimension.

    The last dimension is dropped.
    """
    whole = sum(1 << dim for dim, place in enumerate(places) if place is None)
    masks = [
        *(("begin_mask", whole), ("end_mask", whole), ("ellipsis_mask", 0)),
        *(("new_axis_mask", 0), ("shrink_axis_mask", 1 << (len(places) - 1))),
    ]
    begin, _, strides = (each.constant for each in node.inputs[1:])
    return (
        begin is not None
        and strides is not None
        and len(begin) == len(places)
        and bool((strides == 1).all())
        and all((node.attribute(name) or 0) == mask for name, mask in masks)
        and all(p is None or p == b for p, b in zip(places, begin, strict=True))
    )


# --- functions ------------------------------------------------------------------------


class _Body:
    """Writes the function. It computes parts; other values are its arguments."""

    def __init__(self, parts: _Parts) -> None:
        self.writer = OpWriter(RAGGED_ROWS)
        self.arguments: list[Value] = []
        self.nodes: list[Node] = []
        self._parts = parts
        self._refs: dict[Value, Ref] = {}

    def ref(self, value: Value) -> Ref:
        if value in self._refs:
            return self._refs[value]
        if self._parts.of(value) is not None:
            self._write(value.node)
        elif value.node.is_folded and value.constant is not None:
            return self.writer.constant(value.constant)
        else:
            self.arguments.append(value)
            self._refs[value] = self.writer.argument(value.dtype)
        return self._refs[value]

    def _write(self, node: Node) -> None:
        sources = list(map(self._parts.clamped, node.inputs))
        split = sources[0].node if node.type == "StridedSlice" else None
        if split is not None and split.outputs[0] not in self._refs:
            # Not every output of a split is a part.
            self._write(split)
        self.nodes.append(node)
        outputs = self.writer.repeat(node, list(map(self.ref, sources)), {})
        self._refs |= dict(zip(node.outputs, outputs, strict=True))


def _registered(definition: ProtocolBuffer) -> str:
    """Register a function; equal ones have one name."""
    definition.signature.name = RAGGED_ROWS
    data = definition.SerializeToString(deterministic=True)
    name = f"{RAGGED_ROWS}_{hashlib.sha256(data).hexdigest()[:32]}"
    definition.signature.name = name
    if not tf_functions.is_registered(name):
        tf_functions.register(definition)
    return name
