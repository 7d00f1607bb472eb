"""What the partition does with a function: what is divided, exchanged and whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tfcluster.runtime.partition.costs import cost_of, rounds_of
from tfcluster.runtime.partition.functions import LOOPS
from tfcluster.runtime.partition.graph import Node, Value, elements_of
from tfcluster.runtime.partition.placed import Placed
from tfcluster.runtime.partition.placement import (
    HandleOf,
    ListOf,
    Partial,
    Placement,
    Shard,
    is_whole,
)
from tfcluster.runtime.partition.programs import RankProgram
from tfcluster.runtime.partition.propagate import propagate
from tfcluster.runtime.partition.rules.all import RULES, why_whole
from tfcluster.runtime.partition.rules.table import LocalPlan
from tfcluster.runtime.partition.script_lines import line_of
from tfcluster.runtime.partition.variable_placements import (
    GATHERED,
    candidates,
    division,
    uses_of,
)

MOST_WHOLE_COST = 1_000_000
"""Work that may be computed whole without a warning."""
NO_RULE = "no rule"
OTHER_USE = "its rule does not cover this use"
UNKNOWN_SIZE = "a size of its inputs or results is known only when it runs"
NO_ROWS = "no batch was found that has at least as many rows as there are ranks"

_NUMBER = re.compile(r"^(__(?:back|for)ward_.*)_\d+$")

LineOf = Callable[[Node, str], object | None]
"""The line of the script for a node of a function; see ``script_lines.line_of``."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """A tensor that the ranks make whole."""

    kind: str
    """``rows`` for a tensor of which each rank has its rows; else ``sum``, ``max`` or
    ``min``: what its terms are reduced by."""
    name: str
    """The name of the node that makes the tensor."""
    bytes: int
    """Per call of the function: those of all rounds of a loop. 0 if unknown."""
    wanted_by: str
    """The type of an op that needs it whole; "result" if the function returns it."""
    line: str | None
    """The line that needs the rows whole, or that has computed the terms."""


@dataclass(frozen=True, slots=True)
class WholeRun:
    """Ops of a type that every rank computes whole, though their inputs have rows."""

    op: str
    count: int
    cost: int
    following_cost: int
    """The cost of the ops that are whole only because they follow these."""
    reason: str
    line: str | None

    @property
    def weight(self) -> int:
        return self.cost + self.following_cost


@dataclass(frozen=True, slots=True)
class ReadPipeline:
    """A dataset from which a function takes its batches."""

    divided: bool
    """Whether each rank computes its own rows only."""
    reason: str | None
    """Why every rank computes whole batches, or what else is to be known of it."""


@dataclass(frozen=True, slots=True)
class LoopPipeline(ReadPipeline):
    """A dataset over which Python iterates, itself."""

    line: str | None
    """Where it begins to."""


@dataclass(frozen=True, slots=True)
class FunctionReport:
    """What happens to a function, for inputs of certain shapes."""

    name: str
    trains: bool = False
    rows: int | None = None
    """The number of rows of the batch; None if nothing is divided."""
    cost: int = 0
    """All work; see ``costs.cost_of``."""
    divided: int = 0
    """The part of ``cost`` that the ranks divide."""
    exchanges: int = 0
    exchanged_bytes: int = 0
    exchanged: Sequence[Exchanged] = ()
    """The largest first."""
    whole: Sequence[WholeRun] = ()
    """The most costly first."""
    pipelines: Sequence[ReadPipeline] = ()
    error: str | None = None
    """Why the function could not be divided at all."""
    assigned: Sequence[str] = ()
    """Lines on the variables that it assigns; see ``assigned_of``."""

    @property
    def share(self) -> float:
        """The part of the work that is divided: 0 to 1."""
        return self.divided / self.cost if self.cost else 0.0

    def to_json(self) -> dict[str, Any]:
        fields = {**asdict(self), "divided_share": round(self.share, 4)}
        del fields["divided"]
        return fields


def to_json(
    functions: Sequence[FunctionReport], loops: Sequence[LoopPipeline], ranks: int
) -> dict[str, Any]:
    """The answer of ``tfcluster explain``, but for its version."""
    costly = sorted(functions, key=lambda function: -function.cost)
    return {
        "ranks": ranks,
        "mostly_whole": _most_whole(functions),
        "functions": [function.to_json() for function in costly],
        "loops": [asdict(loop) for loop in loops],
    }


def mostly_whole(
    programs: Sequence[RankProgram], line_of: LineOf = line_of
) -> str | None:
    """A sentence if much work of a program is whole, and less than half is divided."""
    # To look for lines takes time.
    if _most_whole([explained(program, _no_line) for program in programs]) is None:
        return None
    return _most_whole([explained(program, line_of) for program in programs])


def _no_line(node: Node, function: str) -> None:
    return None


def explained(program: RankProgram, line_of: LineOf = line_of) -> FunctionReport:
    """What happens to a function."""
    placed = program.placed
    # TensorFlow numbers the functions that compute gradients.
    name = _NUMBER.sub(r"\1", program.label).strip("_")
    if placed is None:
        return FunctionReport(
            name, error=_text(program.error) if program.error else None
        )
    account = _Account()
    account.add(placed, 1, {})

    def line(node: Node) -> str | None:
        script_line = line_of(node, program.function)
        return None if script_line is None else str(script_line)

    exchanged: Sequence[Sequence[Value]] = (
        [] if program.written is None else program.written.exchanged
    )
    tensors = [
        account.exchanged(value, line)
        for values in exchanged
        for value in values
        if value in account.rounds
    ]
    return FunctionReport(
        name=name,
        trains=program.trains,
        rows=account.rows,
        cost=account.cost,
        divided=account.divided,
        exchanges=sum(account.rounds.get(values[0], 0) for values in exchanged),
        exchanged_bytes=sum(tensor.bytes for tensor in tensors),
        exchanged=sorted(tensors, key=lambda tensor: -tensor.bytes),
        whole=account.whole(line),
    )


def assigned_of(placed: Placed, names: Mapping[int, str], ranks: int) -> list[str]:
    """Which of the variables that a program assigns ``shard_optimizer`` divides.

    ``names`` has their names by their places among the inputs. The others are listed
    with the reason why every rank holds all of them.
    """
    graph = placed.graph
    found = candidates(graph, ranks)
    kept = propagate(graph, placed.inputs, placed.rows, found).inputs
    groups: dict[str, list[tuple[str, int]]] = {}
    for place, handle in enumerate(graph.inputs):
        uses = uses_of(handle, graph) if handle.is_handle else None
        if place not in names or uses is None or not (uses.reads and uses.assigned):
            continue
        reason = division(handle, graph, ranks)
        if isinstance(reason, Shard):
            reason = "" if isinstance(kept[place], HandleOf) else GATHERED
        groups.setdefault(reason, []).append((names[place], uses.reads[0].nbytes))
    lines = []
    for reason, variables in sorted(groups.items()):
        size = sum(nbytes for _, nbytes in variables) / 1e6
        shown = ", ".join(name for name, _ in variables[:_MOST_NAMES])
        more = ", ..." if len(variables) > _MOST_NAMES else ""
        held = "a piece of" if not reason else "all of"
        because = f", since {reason}" if reason else ""
        lines.append(
            f"  {held} {len(variables)} ({size:.1f} MB){because}: {shown}{more}"
        )
    title = "With runtime.shard_optimizer, of the variables that it assigns, a rank has"
    return ["", title, *lines] if "" in groups else []


_MOST_NAMES = 3


def is_divided(plan: LocalPlan) -> bool:
    """Whether each rank computes only its rows of a node, and not the whole."""
    return any(map(_has_rows, (*plan.want, *plan.written)))


def _has_rows(placement: Placement) -> bool:
    if isinstance(placement, ListOf):
        return isinstance(placement.element, Shard)
    return isinstance(placement, Shard)


@dataclass(slots=True)
class _Roots:
    """Nodes that are computed whole, and the cost of what follows from that."""

    cost: dict[Node, int] = field(default_factory=dict)
    following: dict[Node, int] = field(default_factory=dict)


class _Account:
    """Adds up the work of a graph, and of the bodies of its loops and branches."""

    def __init__(self) -> None:
        self.cost = 0
        self.divided = 0
        self.rows: int | None = None
        self.rounds: dict[Value, int] = {}
        """How often each value is computed."""
        self._roots = _Roots()
        self._placements: dict[Value, Placement] = {}
        self._wanted_by: dict[Value, Node] = {}
        """A node that needs whole what is a part."""

    def add(self, placed: Placed, rounds: int, causes: dict[Value, Node]) -> None:
        """Add a graph that runs ``rounds`` times.

        ``causes`` has the inputs that are whole because a node is, with this node. The
        outputs that are whole for such a reason are added to it.
        """
        self.rows = placed.rows if self.rows is None else self.rows
        self._placements.update(placed.placements)
        self.rounds.update(dict.fromkeys(placed.graph.inputs, rounds))
        for node in placed.nodes:
            self.rounds.update(dict.fromkeys(node.outputs, rounds))
            plan = placed.plans[node]
            for value, want in zip(node.inputs, plan.want, strict=False):
                if is_whole(want) and not is_whole(placed.placements[value]):
                    self._wanted_by.setdefault(value, node)
            if node.bodies:
                self._add_bodies(placed, node, rounds, causes)
            else:
                self._add_node(placed, node, plan, cost_of(node) * rounds, causes)

    def _add_node(
        self,
        placed: Placed,
        node: Node,
        plan: LocalPlan,
        cost: int,
        causes: dict[Value, Node],
    ) -> None:
        self.cost += cost
        if is_divided(plan):
            self.divided += cost
            return
        roots = self._roots
        if node in placed.whole:
            cause: Node | None = node
            roots.cost[node] = roots.cost.get(node, 0) + cost
        else:
            inherited = (causes[value] for value in node.inputs if value in causes)
            cause = None if node.is_folded else next(inherited, None)
            if cause is not None:
                roots.following[cause] = roots.following.get(cause, 0) + cost
        if cause is not None:
            causes.update(dict.fromkeys(node.outputs, cause))

    def _add_bodies(
        self, placed: Placed, node: Node, rounds: int, causes: dict[Value, Node]
    ) -> None:
        bodies = placed.bodies[node]
        is_loop = node.type in LOOPS
        if not is_loop:
            bodies = (_likely(bodies),)
        carried = node.inputs if is_loop else node.inputs[1:]
        for body in bodies:
            pairs = zip(body.graph.inputs, carried, strict=True)
            within = {own: causes[outer] for own, outer in pairs if outer in causes}
            self.add(body, rounds * rounds_of(node), within)
            if len(body.graph.outputs) == len(node.outputs):
                results = zip(node.outputs, body.graph.outputs, strict=True)
                causes.update({v: within[own] for v, own in results if own in within})

    # --- answers ----------------------------------------------------------------------

    def exchanged(self, value: Value, line: Callable[[Node], str | None]) -> Exchanged:
        placement = self._placements[value]
        wanting = self._wanted_by.get(value)
        is_terms = isinstance(placement, Partial)
        nbytes = value.nbytes
        if value.list is not None and value.list.dtype is not None:
            elements = elements_of(value.list.shape) or 0
            nbytes = elements * value.list.dtype.size * (value.list.length or 1)
        return Exchanged(
            kind=placement.op if isinstance(placement, Partial) else "rows",
            name=_maker(value).name,
            bytes=nbytes * self.rounds.get(value, 1),
            wanted_by="result" if wanting is None else wanting.type,
            line=line(_maker(value) if is_terms or wanting is None else wanting),
        )

    def whole(self, line: Callable[[Node], str | None]) -> list[WholeRun]:
        """The ops that are the reasons, by type and line."""
        roots = self._roots
        groups: dict[tuple[str, str, str | None], list[Node]] = {}
        for node in roots.cost:
            key = node.type, reason_of(node), line(node)
            groups.setdefault(key, []).append(node)
        runs = [
            WholeRun(
                op,
                len(nodes),
                sum(roots.cost[node] for node in nodes),
                sum(roots.following.get(node, 0) for node in nodes),
                reason,
                where,
            )
            for (op, reason, where), nodes in groups.items()
        ]
        return sorted(runs, key=lambda run: -run.weight)


def reason_of(node: Node) -> str:
    """Why a node with divided inputs is computed whole."""
    if (reason := why_whole(node.type)) is not None:
        return reason
    if node.type not in RULES:
        return NO_RULE
    values = (*node.inputs, *node.outputs)
    sizes_known = all(v.is_handle or v.elements is not None for v in values)
    return OTHER_USE if sizes_known else UNKNOWN_SIZE


def _maker(value: Value) -> Node:
    """The node that computes a value, behind those that only hand it on."""
    while value.node.type in ("Identity", "IdentityN") and value.node.inputs:
        value = value.node.inputs[value.index]
    return value.node


def _likely(branches: Sequence[Placed]) -> Placed:
    """The branch that counts: that for batches of the known size, else the longest."""
    for branch in branches:
        if branch.graph.rows:
            return branch
    return max(branches, key=lambda branch: len(branch.nodes))


def _most_whole(functions: Sequence[FunctionReport]) -> str | None:
    # A function without a batch, such as one that initialises weights, has no rows.
    reports = [
        report for report in functions if report.trains or report.rows is not None
    ]
    worst = max(reports, key=lambda report: report.cost - report.divided, default=None)
    if (
        worst is None
        or worst.share >= 0.5
        or worst.cost - worst.divided <= MOST_WHOLE_COST
    ):
        return None
    sentence = (
        f"every rank computes {1 - worst.share:.0%} of the work of {worst.name} whole"
    )
    if worst.rows is None:
        return f"{sentence}: {NO_ROWS}"
    if not worst.whole:
        return f"{sentence}: it depends on no row of the batch"
    first = worst.whole[0]
    place = "" if first.line is None else f" in {first.line}"
    return f"{sentence}: {first.op}{place} is not divided ({first.reason})"


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
