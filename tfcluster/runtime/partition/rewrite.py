"""Writes the function of one process: its ranks' ops, and the exchanges between them.

A process computes for one rank, or for several ranks at once (``Ranks.local``), as for
shards, in tests and to explain a program. Ops on whole tensors are written once, ops on
parts once for each of the process's ranks.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.draws import Draws
from tfcluster.runtime.partition.exchange import Exchanger, is_in_order
from tfcluster.runtime.partition.functions import LOOPS
from tfcluster.runtime.partition.fused_updates import fused_updates
from tfcluster.runtime.partition.graph import Node, Value
from tfcluster.runtime.partition.placed import Placed
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    HandleOf,
    ListOf,
    Placement,
    Ranks,
    Shape,
    Shard,
    Split,
)
from tfcluster.runtime.partition.propagate import has_effect
from tfcluster.runtime.partition.redistribute import (
    Pending,
    Redistribution,
    Refs,
    Traffic,
    is_single,
)
from tfcluster.runtime.partition.rules.random import is_stateful_draw
from tfcluster.runtime.partition.rules.table import LocalPlan
from tfcluster.runtime.partition.writer import FunctionName, OpWriter, Ref
from tfcluster.runtime.tensor_types import Array, ProtocolBuffer


@dataclass(slots=True)
class Written:
    """The definitions of a rank's functions; the first is the one to call."""

    definitions: list[ProtocolBuffer]
    keep: list[object] = field(default_factory=list)
    """Objects that must live as long as the functions."""
    exchanged: list[Sequence[Value]] = field(default_factory=list)
    """The values of each exchange; those of loops and branches are among them."""
    words: tuple[str, ...] = ()
    """See ``Exchanger.words``."""
    for_xla: Mapping[str, Mapping[str, Node | None]] = field(default_factory=dict)
    """By the names of definitions and of their nodes: what XLA is to compile, and for
    which node of the graph it is written, if for one."""
    of_any_size: AbstractSet[str] = frozenset()
    """The names of the definitions for batches whose size is known when they run."""

    @property
    def exchanges(self) -> int:
        return len(self.exchanged)

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
    handles: Sequence[ProtocolBuffer | None] = (),
    input_placements: Sequence[Placement] = (),
    visible: int | None = None,
) -> Written:
    """The function of a process, which gets and returns whole tensors.

    ``handles`` says what the handles among the inputs refer to. The inputs come with
    ``input_placements``, else whole. Only the first ``visible`` outputs have to be
    whole; others stay parts, see ``returned``. Registers the functions of loops and
    branches, but not the function itself.
    """
    process = _Process(ranks, exchanger, draws)
    body = _Body(process, placed, stem)
    count = len(placed.inputs)
    for value, handle, placement in zip(
        placed.graph.inputs,
        list(handles) or [None] * count,
        list(input_placements) or [REPLICATE] * count,
        strict=True,
    ):
        if isinstance(placement, HandleOf):
            body.put(value, placement, body.handles(placement, handle))
            continue
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
        [exchanger],
        process.traffic.values,
        () if exchanger is None else tuple(exchanger.words),
        process.for_xla,
        process.of_any_size,
    )


def returned(placed: Placed, ranks: Ranks, visible: int | None) -> list[Placement]:
    """The placements of what a process returns: whole, but for hidden parts.

    A process of several ranks has no single tensor that is its part. Where processes
    may have one or several, all of them return the same.
    """
    placements: list[Placement] = []
    can_hide = len(ranks.local) == 1 and not ranks.ordered
    for index, placement in enumerate(placed.outputs):
        hidden = visible is not None and index >= visible and can_hide
        if isinstance(placement, ListOf):
            placements.append(ListOf(REPLICATE))
        elif hidden and isinstance(placement, Shard):
            placements.append(placement)
        else:
            placements.append(REPLICATE)
    return placements


class _Process:
    """What all bodies of a function share."""

    def __init__(self, ranks: Ranks, exchanger: Exchanger | None, draws: Draws) -> None:
        self.draws = draws
        self.ranks = ranks
        self.splits = ranks.splits
        self.traffic = Traffic(exchanger)
        self.definitions: list[ProtocolBuffer] = []
        self.for_xla: dict[str, Mapping[str, Node | None]] = {}
        self.of_any_size: set[str] = set()


@dataclass(slots=True)
class _LocalOps:
    """See ``rules.table.Local``."""

    writer: OpWriter
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
        self.writer = OpWriter(stem)
        self._values = Redistribution(
            self.writer, placed, process.ranks, process.traffic
        )
        self._asks_for_xla = any(node.for_xla for node in placed.nodes)
        self.writer.compiles = self._asks_for_xla
        self._fused = fused_updates(placed)
        self._written: dict[Node, list[str]] = {}
        """The names of the nodes written for a node."""
        self._effects: list[str] = []
        self._reads: list[str] = []
        """Nodes that see the effects of others, and so run before what waits for the
        function. TensorFlow inlines it, and waits for nothing else."""

    def put(self, value: Value, placement: Placement, refs: Refs) -> None:
        """Note the refs of an input."""
        self._values.put(value, placement, refs)
        self._written[value.node] = []

    def handles(self, placement: HandleOf, whole: ProtocolBuffer | None) -> Refs:
        """Arguments for the handles of the ranks' pieces of a divided variable."""
        assert whole is not None
        shape = [dim.size for dim in whole.shape_and_type[0].shape.dim]
        shard = placement.element
        return tuple(
            self.writer.argument(
                tf.resource,
                None,
                tf_functions.with_shape(whole, split.local_shape(shape, shard)),
            )
            for split in self._process.splits
        )

    def of_this_size(self, batch: Ref, shape: Shape) -> Ref:
        """A batch that is known to have this shape.

        TensorFlow's constant folding takes the sizes of tensors that it finds to be
        equal in one branch to be equal in the other one, too. It does not connect the
        sizes before and after a slice.
        """
        begin, size = (np.array(sizes, np.int32) for sizes in ([0] * len(shape), shape))
        inputs = [batch, self.writer.constant(begin), self.writer.constant(size)]
        return self.writer.op("Slice", inputs, {})[0]

    @property
    def exchanges(self) -> bool:
        """Whether an exchange has been written."""
        return bool(self._values.last_exchange)

    def finish(self, outputs: Sequence[Ref]) -> ProtocolBuffer:
        names = [self._values.last_exchange] if self._values.last_exchange else []
        self._process.for_xla[self.writer.name] = self.writer.for_xla
        return self.writer.finish(outputs, [*self._effects, *self._reads, *names])

    def run(self, wanted: Sequence[Placement]) -> list[Refs]:
        """Write all nodes; returns the outputs with the placements wanted."""
        self._write(self._placed.nodes)
        outputs = list(zip(self._placed.graph.outputs, wanted, strict=True))
        while True:
            pending: Pending = {}
            results = [self._values.get(*output, pending) for output in outputs]
            if not pending:
                return [refs for refs in results if refs is not None]
            self._values.exchange(pending)

    def _write(self, nodes: Sequence[Node]) -> None:
        """Write these nodes, and exchange what they need as soon as it is there.

        A node is tried in its turn, and again whenever something that it needs has
        been written or exchanged.
        """
        users: dict[Node, list[int]] = {}
        for turn, node in enumerate(nodes):
            for needed in {*node.controls, *(value.node for value in node.inputs)}:
                users.setdefault(needed, []).append(turn)
        turns = list(range(len(nodes)))
        while turns:
            queued, waiting = set(turns), set[int]()
            pending: Pending = {}
            while turns:
                turn = heapq.heappop(turns)
                queued.remove(turn)
                node = nodes[turn]
                if node in self._written:
                    continue
                if self._try(node, pending):
                    new = [i for i in users.get(node, ()) if i not in queued]
                    queued.update(new)
                    for later in new:
                        heapq.heappush(turns, later)
                elif any(value in pending for value in node.inputs):
                    waiting.add(turn)
            self._values.exchange(pending)
            turns = sorted(waiting)
        for node in nodes:
            if node not in self._written:
                raise NotImplementedError(f"the graph of {node.name} has a circle")

    def _try(self, node: Node, pending: Pending) -> bool:
        """Write a node, if all that it needs has been written."""
        if any(control not in self._written for control in node.controls):
            return False
        plan = self._placed.plans[node]
        if node.is_folded:
            for value in node.outputs:
                assert value.constant is not None
                ref = self.writer.constant(value.constant)
                self._values.put(value, REPLICATE, (ref,))
            self._written[node] = [n for c in node.controls for n in self._written[c]]
            return True
        # All that is there is exchanged as soon as possible, even if the node still
        # waits for others of its inputs.
        inputs = [
            self._values.get(value, want, pending) if value in self._values else None
            for value, want in zip(node.inputs, plan.want, strict=True)
        ]
        ready = [refs for refs in inputs if refs is not None]
        if len(ready) < len(inputs):
            return False
        waits = [name for control in node.controls for name in self._written[control]]
        in_order = is_in_order(node)
        if in_order:
            waits.append(self._values.last_exchange)
        with self.writer.after(waits):
            self._node(node, plan, ready)
        if not self._written[node]:
            # Nothing was written for it. What waits for it waits for what it needs.
            needed = (ref.node for refs in ready for ref in refs)
            self._written[node] = [name for name in (*waits, *needed) if name]
        if in_order:
            self._values.last_exchange = self.writer.last
        return True

    def _node(self, node: Node, plan: LocalPlan, inputs: list[Refs]) -> None:
        writer = self.writer
        writer.source = node
        writer.compiles = node.for_xla or node in self._fused
        if node.bodies:
            refs = self._with_bodies(node, plan, inputs)
        else:
            refs = self._plain(node, plan, inputs)
        writer.source, writer.compiles = None, self._asks_for_xla
        for value, placement, forms in zip(
            node.outputs, plan.written, refs, strict=True
        ):
            self._values.put(value, placement, forms)
        if has_effect(node):
            self._effects += self._written[node]
            self._values.effects += self._written[node]
        elif node.stateful:
            self._reads += self._written[node]

    def _plain(self, node: Node, plan: LocalPlan, inputs: list[Refs]) -> list[Refs]:
        splits = self._process.splits
        if all(map(is_single, (*plan.want, *plan.written))):
            splits = splits[:1]
        of_ranks: list[Sequence[Ref]] = []
        names = []
        for index, split in enumerate(splits):
            own = [refs[index] if len(refs) > 1 else refs[0] for refs in inputs]
            local = _LocalOps(self.writer, split)
            self.writer.last = ""
            if is_stateful_draw(node):
                of_ranks.append(self._process.draws.write(self.writer, node, own))
            elif plan.build is None:
                of_ranks.append(local.repeat(node, own))
            else:
                of_ranks.append(plan.build(local, node, own))
            names.append(self.writer.last)
        self._written[node] = [name for name in names if name]
        return [
            refs[:1] if is_single(placement) else refs
            for placement, refs in zip(
                plan.written, zip(*of_ranks, strict=True), strict=True
            )
        ]

    # --- loops and branches -----------------------------------------------------------

    def _with_bodies(
        self, node: Node, plan: LocalPlan, inputs: list[Refs]
    ) -> list[Refs]:
        is_loop = node.type in LOOPS
        carried = inputs if is_loop else inputs[1:]
        wants = plan.want if is_loop else plan.want[1:]
        bodies = []
        for index, placed in enumerate(self._placed.bodies[node]):
            body = _Body(
                self._process, placed, f"{node.name.rpartition('/')[2]}_of_rank"
            )
            for place, (value, want, refs) in enumerate(
                zip(placed.graph.inputs, wants, carried, strict=True)
            ):
                shape, splits = value.shape, self._process.splits
                arguments = tuple(
                    body.writer.argument(
                        ref.dtype,
                        None if shape is None else split.local_shape(shape, want),
                    )
                    for ref, split in zip(refs, splits, strict=False)
                )
                if place in placed.graph.rows:
                    assert shape is not None
                    arguments = (body.of_this_size(arguments[0], shape),)
                body.put(value, want, arguments)
            if placed.graph.of_any_size or self._is_of_any_size:
                self._process.of_any_size.add(body.writer.name)
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
        with self.writer.after([self._values.last_exchange] if exchanges else []):
            results = iter(
                self.writer.node(op_type, flat, attributes, node.name, node.device)
            )
        self._written[node] = [self.writer.last]
        if exchanges:
            self._values.last_exchange = self.writer.last
        ranks = len(self._process.splits)
        return [
            tuple(itertools.islice(results, 1 if is_single(placement) else ranks))
            for placement in plan.outputs
        ]

    @property
    def _is_of_any_size(self) -> bool:
        return self.writer.name in self._process.of_any_size

    @property
    def has_effects(self) -> bool:
        return bool(self._effects)

    def _body_attributes(
        self,
        node: Node,
        plan: LocalPlan,
        inputs: Sequence[Refs],
        bodies: Sequence[_Body],
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
            for _ in range(1 if is_single(placement) else ranks)
        ]
        if "branches" in attributes:
            return {**attributes, "branches": names}
        return {**attributes, "else_branch": names[0], "then_branch": names[1]}


def _draws(node: Node) -> bool:
    """Whether a loop draws random numbers from a state of an op."""
    return any(
        is_stateful_draw(inner) for body in node.bodies for inner in body.all_nodes()
    )
