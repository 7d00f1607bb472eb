"""Writes the function of one process: its ranks' ops, and the exchanges between them.

A process computes for one rank, or for several ranks at once (``Ranks.local``), as for
shards, in tests and to explain a program. Ops on whole tensors are written once, ops on
parts once for each of the process's ranks.

Exchanges are written in a fixed order, the same on every rank. All tensors that are
needed whole before anything else can be computed go into one exchange.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.draws import Draws
from tfcluster.runtime.partition.exchange import Exchanger, Request
from tfcluster.runtime.partition.functions import LOOPS
from tfcluster.runtime.partition.graph import Node, Value, elements_of
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    ListOf,
    Partial,
    Placement,
    Replicate,
    Shape,
    Shard,
    Split,
)
from tfcluster.runtime.partition.propagate import Placed, has_effect
from tfcluster.runtime.partition.rules.random import is_stateful_draw
from tfcluster.runtime.partition.rules.table import Plan
from tfcluster.runtime.partition.writer import FunctionName, Ref, Writer
from tfcluster.runtime.tensor_types import Array, Message

BUCKET_BYTES = 8 << 20
"""The size above which reductions are split into several exchanges, so that the first
go while the last terms are computed."""

Refs = tuple[Ref, ...]
"""One for each of the process's ranks, or a single one for a whole tensor."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks among which a batch is divided, and those of this process."""

    size: int
    local: tuple[int, ...]

    @property
    def splits(self) -> list[Split]:
        return [Split(rank, self.size) for rank in self.local]

    @property
    def exchanges(self) -> bool:
        """Whether there are other processes."""
        return len(self.local) < self.size


@dataclass(slots=True)
class Written:
    """The definitions of a rank's functions; the first is the one to call."""

    definitions: list[Message]
    exchanges: int = 0
    exchanged_bytes: int = 0
    keep: list[object] = field(default_factory=list)
    """Objects that must live as long as the functions."""
    exchanged: list[Sequence[Value]] = field(default_factory=list)
    """The values of each exchange; those of loops and branches are among them."""

    @property
    def name(self) -> str:
        name: str = self.definitions[0].signature.name
        return name


def rewrite(
    placed: Placed,
    stem: str,
    ranks: Ranks,
    exchanger: Exchanger | None,
    draws: Draws,
    handles: Sequence[Message | None] = (),
    given: Sequence[Placement] = (),
    visible: int | None = None,
) -> Written:
    """The function of a process, which gets and returns whole tensors.

    ``handles`` says what the handles among the inputs refer to. ``given`` are the
    placements with which the inputs come, if not whole. Only the first ``visible``
    outputs have to be whole; others stay parts, if the process has one rank. Registers
    the functions of loops and branches, but not the function itself.
    """
    process = _Process(ranks, exchanger, draws)
    body = _Body(process, placed, stem)
    count = len(placed.inputs)
    for value, handle, placement in zip(
        placed.graph.inputs,
        list(handles) or [None] * count,
        list(given) or [REPLICATE] * count,
        strict=True,
    ):
        shape = value.shape
        if shape is not None:
            shape = process.splits[0].local_shape(shape, placement)
        ref = body.writer.argument(value.dtype, shape, handle)
        body.put(value, placement, (ref,))
    wanted = returned(placed, ranks, visible)
    outputs = body.run(wanted)
    definition = body.finish([refs[0] for refs in outputs])
    return Written(
        [definition, *process.definitions],
        process.exchanges,
        process.exchanged_bytes,
        [exchanger],
        process.exchanged,
    )


def returned(placed: Placed, ranks: Ranks, visible: int | None) -> list[Placement]:
    """The placements of what a process returns: whole, but for hidden parts."""
    found: list[Placement] = []
    for index, placement in enumerate(placed.outputs):
        hidden = visible is not None and index >= visible and len(ranks.local) == 1
        if isinstance(placement, ListOf):
            found.append(ListOf(REPLICATE))
        elif hidden and isinstance(placement, Shard):
            found.append(placement)
        else:
            found.append(REPLICATE)
    return found


class _Process:
    """What all bodies of a function share."""

    def __init__(self, ranks: Ranks, exchanger: Exchanger | None, draws: Draws) -> None:
        self.draws = draws
        self.ranks = ranks
        self.splits = ranks.splits
        self.exchanger = exchanger
        self.definitions: list[Message] = []
        self.exchanges = 0
        self.exchanged_bytes = 0
        self.exchanged: list[Sequence[Value]] = []


@dataclass(slots=True)
class _LocalOps:
    """See ``rules.table.Local``."""

    writer: Writer
    split: Split

    def repeat(
        self, node: Node, inputs: Sequence[Ref], **attributes: object
    ) -> list[Ref]:
        return self.writer.repeat(node, inputs, attributes)

    def op(
        self, op_type: str, inputs: Sequence[Ref | Sequence[Ref]], **attributes: object
    ) -> list[Ref]:
        return self.writer.op(op_type, inputs, attributes)

    def constant(self, array: Array) -> Ref:
        return self.writer.constant(array)


class _Body:
    """Writes the function for one graph: the whole, a loop's body, or a branch."""

    def __init__(self, process: _Process, placed: Placed, stem: str) -> None:
        self._process = process
        self._placed = placed
        self.writer = Writer(stem)
        self._forms: dict[Value, dict[Placement, Refs]] = {}
        self._written: dict[Node, list[str]] = {}
        """The names of the nodes written for a node."""
        self._last_exchange = ""
        self._effects: list[str] = []
        self._reads: list[str] = []
        """Nodes that see the effects of others, and so run before what waits for the
        function. TensorFlow inlines it, and waits for nothing else."""
        self._order = {node: i for i, node in enumerate(placed.nodes)}

    def put(self, value: Value, placement: Placement, refs: Refs) -> None:
        """Note the refs of an input."""
        self._forms.setdefault(value, {})[placement] = refs
        self._written[value.node] = []

    @property
    def exchanges(self) -> bool:
        """Whether an exchange has been written."""
        return bool(self._last_exchange)

    def finish(self, outputs: Sequence[Ref]) -> Message:
        names = [self._last_exchange] if self._last_exchange else []
        return self.writer.finish(outputs, [*self._effects, *self._reads, *names])

    def run(self, wanted: Sequence[Placement]) -> list[Refs]:
        """Write all nodes; returns the outputs with the placements wanted."""
        todo = [node for node in self._placed.nodes if node not in self._written]
        while todo:
            blocked = []
            pending: dict[Value, None] = {}
            for node in todo:
                if not self._try(node, pending):
                    blocked.append(node)
            if len(blocked) == len(todo) and not pending:
                raise NotImplementedError(f"the graph of {todo[0].name} has a circle")
            self._exchange(pending)
            todo = blocked
        outputs = self._placed.graph.outputs
        pending = {}
        for value, want in zip(outputs, wanted, strict=True):
            self._get(value, want, pending)
        self._exchange(pending)
        found = [
            self._get(value, want, {})
            for value, want in zip(outputs, wanted, strict=True)
        ]
        return [refs for refs in found if refs is not None]

    def _try(self, node: Node, pending: dict[Value, None]) -> bool:
        """Write a node, if all that it needs has been written."""
        if any(each not in self._written for each in node.controls):
            return False
        plan = self._placed.plans[node]
        if node.is_folded:
            for value in node.outputs:
                assert value.constant is not None
                ref = self.writer.constant(value.constant)
                self._forms[value] = {REPLICATE: (ref,)}
            self._written[node] = [n for c in node.controls for n in self._written[c]]
            return True
        if any(value not in self._forms for value in node.inputs):
            return False
        inputs = [
            self._get(value, want, pending)
            for value, want in zip(node.inputs, plan.want, strict=True)
        ]
        ready = [refs for refs in inputs if refs is not None]
        if len(ready) < len(inputs):
            return False
        waits = [name for each in node.controls for name in self._written[each]]
        with self.writer.after(waits):
            self._node(node, plan, ready)
        return True

    def _node(self, node: Node, plan: Plan, inputs: list[Refs]) -> None:
        if node.bodies:
            refs = self._with_bodies(node, plan, inputs)
        else:
            refs = self._plain(node, plan, inputs)
        made = plan.outputs if plan.made is None else plan.made
        for value, placement, found in zip(node.outputs, made, refs, strict=True):
            self._forms[value] = {placement: found}
        if has_effect(node):
            self._effects += self._written[node]
        elif node.stateful:
            self._reads += self._written[node]

    def _plain(self, node: Node, plan: Plan, inputs: list[Refs]) -> list[Refs]:
        made = plan.outputs if plan.made is None else plan.made
        parts = [not _is_single(each) for each in (*plan.want, *made)]
        splits = self._process.splits if any(parts) else self._process.splits[:1]
        found: list[Sequence[Ref]] = []
        names = []
        for index, split in enumerate(splits):
            own = [refs[index] if len(refs) > 1 else refs[0] for refs in inputs]
            local = _LocalOps(self.writer, split)
            self.writer.last = ""
            if is_stateful_draw(node):
                found.append(self._process.draws.write(self.writer, node, own))
            elif plan.build is None:
                found.append(local.repeat(node, own))
            else:
                found.append(plan.build(local, node, own))
            names.append(self.writer.last)
        self._written[node] = [name for name in names if name]
        return [
            refs[:1] if _is_single(placement) else refs
            for placement, refs in zip(made, zip(*found, strict=True), strict=True)
        ]

    # --- redistribution ---------------------------------------------------------------

    def _get(
        self, value: Value, want: Placement, pending: dict[Value, None]
    ) -> Refs | None:
        """A value's refs with the placement wanted.

        None if that takes an exchange, for which the value is added to ``pending``.
        """
        found = self._found(value, want, pending)
        count = 1 if _is_single(want) else len(self._process.splits)
        if found is not None and len(found) < count:
            return found * count
        return found

    def _found(
        self, value: Value, want: Placement, pending: dict[Value, None]
    ) -> Refs | None:
        forms = self._forms[value]
        found = forms.get(want)
        if found is not None:
            return found
        if isinstance(want, ListOf) or isinstance(
            self._placed.placements.get(value), ListOf
        ):
            wanted = want if isinstance(want, ListOf) else ListOf(REPLICATE)
            return self._list(value, wanted, pending)
        whole = forms.get(REPLICATE)
        if whole is None:
            pending[value] = None
            return None
        refs = tuple(self._part(whole[0], value, want))
        forms[want] = refs
        return refs

    def _part(self, whole: Ref, value: Value, want: Placement) -> Iterator[Ref]:
        for split in self._process.splits:
            if isinstance(want, Shard):
                yield self._rows(whole, value.shape, want, split)
            elif want == Partial("sum") and split.rank:
                yield self.writer.op("ZerosLike", [whole], {})[0]
            else:
                yield whole

    def _rows(self, whole: Ref, shape: Shape | None, want: Shard, split: Split) -> Ref:
        """The rows of a rank."""
        assert shape is not None
        rank = len(shape)
        first, count = split.first(want.rows), split.count(want.rows)
        if want.outer == 1:
            begin, size = [0] * rank, [-1] * rank
            begin[want.dim], size[want.dim] = first * want.inner, count * want.inner
            return self._slice(whole, begin, size)
        blocks = (*shape[: want.dim], want.outer, want.block, *shape[want.dim + 1 :])
        reshaped = self._reshape(whole, blocks)
        begin, size = [0] * (rank + 1), [-1] * (rank + 1)
        begin[want.dim + 1], size[want.dim + 1] = (
            first * want.inner,
            count * want.inner,
        )
        part = self._slice(reshaped, begin, size)
        return self._reshape(part, split.local_shape(shape, want))

    def _slice(self, ref: Ref, begin: Sequence[int], size: Sequence[int]) -> Ref:
        write = self.writer
        constants = [write.constant(np.array(each, np.int32)) for each in (begin, size)]
        return write.op("Slice", [ref, *constants], {})[0]

    def _reshape(self, ref: Ref, shape: Shape) -> Ref:
        unknown = [i for i, size in enumerate(shape) if size is None]
        if len(unknown) > 1:
            raise NotImplementedError("a tensor with rows has two unknown sizes")
        sizes = np.array([-1 if size is None else size for size in shape], np.int32)
        return self.writer.op("Reshape", [ref, self.writer.constant(sizes)], {})[0]

    def _list(
        self, value: Value, want: ListOf, pending: dict[Value, None]
    ) -> Refs | None:
        """A TensorList whose elements have another placement."""
        forms = self._forms[value]
        have = self._placed.placements[value]
        if not isinstance(have, ListOf):
            have = next(iter(forms))
        if not isinstance(have, ListOf):
            # A list that was made whole.
            have = ListOf(REPLICATE)
            forms[have] = next(iter(forms.values()))
        if want.element is None or have.element is None or have == want:
            return forms[have]
        whole = forms.get(ListOf(REPLICATE))
        if isinstance(have.element, Shard) and whole is None:
            pending[value] = None
            return None
        assert whole is not None
        if want.element == REPLICATE:
            return whole
        assert isinstance(want.element, Shard)
        assert value.list is not None
        shape = value.list.shape
        if shape is None:
            raise NotImplementedError("a list of elements of unknown shape")
        stacked = self._stacked(whole[0], shape, value)
        rows = want.element.at(want.element.dim + 1)
        parts = [
            self._from_tensor(self._rows(stacked, (None, *shape), rows, split))
            for split in self._process.splits
        ]
        forms[want] = tuple(parts)
        return forms[want]

    def _stacked(self, handle: Ref, element: Shape, value: Value) -> Ref:
        assert value.list is not None
        sizes = np.array([-1 if s is None else s for s in element], np.int32)
        return self.writer.op(
            "TensorListStack",
            [handle, self.writer.constant(sizes.reshape(-1))],
            {"element_dtype": value.list.dtype},
        )[0]

    def _from_tensor(self, ref: Ref) -> Ref:
        unknown = self.writer.constant(np.array(-1, np.int32))
        return self.writer.op("TensorListFromTensor", [ref, unknown], {})[0]

    # --- exchanges --------------------------------------------------------------------

    def _exchange(self, pending: Mapping[Value, None]) -> None:
        """Make these values whole on every rank."""
        reductions: list[Value] = []
        gathers: list[Value] = []
        for value in pending:
            placement = self._placed.placements[value]
            kind = reductions if isinstance(placement, Partial) else gathers
            kind.append(value)
        reductions.sort(key=lambda value: self._order.get(value.node, 0))
        for bucket in _buckets(reductions, gathers):
            self._exchange_bucket(bucket)

    def _exchange_bucket(self, values: Sequence[Value]) -> None:
        requests = []
        for value in values:
            placement = self._placed.placements[value]
            shape = value.shape
            refs = self._forms[value].get(placement)
            if isinstance(placement, ListOf):
                assert refs is not None
                assert value.list is not None
                assert value.list.shape is not None
                assert isinstance(placement.element, Shard)
                element, shape = placement.element, (None, *value.list.shape)
                splits = self._process.splits
                refs = tuple(
                    self._stacked(ref, split.local_shape(shape[1:], element), value)
                    for ref, split in zip(refs, splits, strict=True)
                )
                placement = element.at(element.dim + 1)
            assert refs is not None
            assert isinstance(placement, Partial | Shard)
            ref = self._combined(refs, placement, shape)
            requests.append(Request(ref, placement, shape, value.node.name))
        whole = [each.ref for each in requests]
        if self._process.ranks.exchanges:
            assert self._process.exchanger is not None
            with self.writer.after([self._last_exchange]):
                whole = self._process.exchanger.write(self.writer, requests)
            self._last_exchange = self.writer.last
            # The shapes that the host's function does not tell.
            whole = [
                self._ensured(ref, each.shape)
                for ref, each in zip(whole, requests, strict=True)
            ]
        self._process.exchanges += 1
        self._process.exchanged_bytes += sum(value.nbytes for value in values)
        self._process.exchanged.append(values)
        for value, ref in zip(values, whole, strict=True):
            if isinstance(self._placed.placements[value], ListOf):
                self._forms[value][ListOf(REPLICATE)] = (self._from_tensor(ref),)
            else:
                self._forms[value][REPLICATE] = (ref,)

    def _ensured(self, ref: Ref, shape: Shape | None) -> Ref:
        if elements_of(shape) is None:
            return ref
        return self.writer.op("EnsureShape", [ref], {"shape": tf.TensorShape(shape)})[0]

    def _combined(
        self, refs: Refs, placement: Partial | Shard, shape: Shape | None
    ) -> Ref:
        """The part of all of this process's ranks."""
        if len(refs) == 1:
            return refs[0]
        write = self.writer
        if isinstance(placement, Partial):
            op = {"sum": "AddV2", "max": "Maximum", "min": "Minimum"}[placement.op]
            if refs[0].dtype == tf.bool:
                op = {"max": "LogicalOr", "min": "LogicalAnd"}[placement.op]
            found = refs[0]
            for ref in refs[1:]:
                found = write.op(op, [found, ref], {})[0]
            return found
        assert shape is not None
        splits = self._process.splits
        axis = placement.dim
        parts = list(refs)
        if placement.outer > 1:
            axis += 1
            parts = [
                self._reshape(
                    ref,
                    (
                        *shape[: placement.dim],
                        placement.outer,
                        split.local_block(placement),
                        *shape[placement.dim + 1 :],
                    ),
                )
                for ref, split in zip(parts, splits, strict=True)
            ]
        where = write.constant(np.array(axis, np.int32))
        found = write.op("ConcatV2", [parts, where], {})[0]
        if placement.outer > 1:
            size = sum(split.local_size(placement) for split in splits)
            found = self._reshape(
                found, (*shape[: placement.dim], size, *shape[placement.dim + 1 :])
            )
        return found

    # --- loops and branches -----------------------------------------------------------

    def _with_bodies(self, node: Node, plan: Plan, inputs: list[Refs]) -> list[Refs]:
        is_loop = node.type in LOOPS
        carried = inputs if is_loop else inputs[1:]
        wants = plan.want if is_loop else plan.want[1:]
        bodies = []
        for index, placed in enumerate(self._placed.bodies[node]):
            body = _Body(
                self._process, placed, f"{node.name.rpartition('/')[2]}_of_rank"
            )
            for value, want, refs in zip(
                placed.graph.inputs, wants, carried, strict=True
            ):
                body.put(value, want, tuple(body.argument_like(value, r) for r in refs))
            is_condition = is_loop and index == 0
            outputs = body.run([REPLICATE] if is_condition else plan.outputs)
            definition = body.finish([ref for refs in outputs for ref in refs])
            self._process.definitions.append(definition)
            tf_functions.register(definition)
            bodies.append(body)
        exchanges = any(body.exchanges for body in bodies)
        attributes = self._body_attributes(node, plan, inputs, bodies)
        flat = [ref for refs in inputs for ref in refs]
        op_type = node.type
        if exchanges or any(body.has_effects for body in bodies):
            op_type = op_type.removeprefix("Stateless")
        if is_loop and (exchanges or _draws(node)):
            # In an order that all ranks share.
            attributes["parallel_iterations"] = 1
        with self.writer.after([self._last_exchange] if exchanges else []):
            found = self.writer.node(op_type, flat, attributes, node.name, node.device)
        self._written[node] = [self.writer.last]
        if exchanges:
            self._last_exchange = self.writer.last
        results = iter(found)
        ranks = len(self._process.splits)
        return [
            tuple(itertools.islice(results, 1 if _is_single(each) else ranks))
            for each in plan.outputs
        ]

    def argument_like(self, value: Value, ref: Ref) -> Ref:
        """An argument for a value that is ``ref`` outside."""
        return self.writer.argument(ref.dtype)

    @property
    def has_effects(self) -> bool:
        return bool(self._effects)

    def _body_attributes(
        self, node: Node, plan: Plan, inputs: Sequence[Refs], bodies: Sequence[_Body]
    ) -> dict[str, object]:
        dropped = ("output_shapes", "_num_original_outputs", "T", "Tin", "Tout")
        attributes: dict[str, object] = {
            k: v for k, v in node.attributes.items() if k not in dropped
        }
        names = [FunctionName(body.writer.name) for body in bodies]
        types = [ref.dtype for refs in inputs for ref in refs]
        if node.type in LOOPS:
            return {**attributes, "T": types, "cond": names[0], "body": names[1]}
        ranks = len(self._process.splits)
        attributes["Tin"] = types[1:]
        attributes["Tout"] = [
            value.dtype
            for value, placement in zip(node.outputs, plan.outputs, strict=True)
            for _ in range(1 if _is_single(placement) else ranks)
        ]
        if "branches" in attributes:
            return {**attributes, "branches": names}
        return {**attributes, "else_branch": names[0], "then_branch": names[1]}


def _draws(node: Node) -> bool:
    """Whether a loop draws random numbers from a state of an op."""
    return any(
        is_stateful_draw(each) for body in node.bodies for each in body.all_nodes()
    )


def _is_single(placement: Placement) -> bool:
    """Whether one tensor serves all ranks of a process."""
    if isinstance(placement, ListOf):
        return not isinstance(placement.element, Shard)
    return isinstance(placement, Replicate)


def _buckets(
    reductions: Sequence[Value], gathers: Sequence[Value]
) -> Iterable[Sequence[Value]]:
    """The values of each exchange."""
    bucket: list[Value] = list(gathers)
    nbytes = sum(value.nbytes for value in gathers)
    for value in reductions:
        if bucket and nbytes + value.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(value)
        nbytes += value.nbytes
    if bucket:
        yield bucket
