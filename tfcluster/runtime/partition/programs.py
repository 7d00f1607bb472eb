"""A function's programs: its definitions for the ranks, by the shapes of its inputs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import tensorflow as tf

from tfcluster.runtime.errors import CollectiveError
from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.draws import Draws
from tfcluster.runtime.partition.exchange import Exchanger, is_in_order
from tfcluster.runtime.partition.functions import Function, op_types
from tfcluster.runtime.partition.graph import Node, OpGraph, elements_of
from tfcluster.runtime.partition.own_rows import CHANGES, OwnRows
from tfcluster.runtime.partition.placed import Placed
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    HandleOf,
    Placement,
    Ranks,
    Shape,
    Shard,
)
from tfcluster.runtime.partition.program_inputs import ProgramInput, RowPart
from tfcluster.runtime.partition.propagate import propagate
from tfcluster.runtime.partition.rewrite import Written, returned, rewrite
from tfcluster.runtime.partition.rules.random import WITH_STATE, is_stateful_draw
from tfcluster.runtime.partition.shape_graph import ShapeGraph
from tfcluster.runtime.partition.specialise import specialise
from tfcluster.runtime.partition.table_lookups import gather_from_handles
from tfcluster.runtime.partition.taken_batches import (
    Taken,
    TakenElement,
    fetches_of,
    takes_of,
)
from tfcluster.runtime.partition.tf_functions import HostFunction
from tfcluster.runtime.partition.variable_placements import VariableShards, candidates
from tfcluster.runtime.partition.variables import VariableNames, Watched, watched
from tfcluster.runtime.partition.xla import Compiled, compiled
from tfcluster.runtime.tensor_types import Array, DType

_HANDLES = (tf.resource, tf.variant)
_READING = re.compile(r"(/Cast(_\d+)?)?/?ReadVariableOp(_\d+)?(__\d+)?$")
_TRACE = re.compile(r"^__inference_|(_\d+)+$")
_BACKWARD = "__backward_"
"""The beginning of the name of a function that computes gradients for a tape."""
_OF_TAPES = ("__forward_", _BACKWARD)
"""Beginnings of the names of functions that compute a step together."""


Key: TypeAlias = tuple[
    int | None,
    int | None,
    tuple[tuple[DType, Shape, Shard | None] | Placement | None, ...],
]


@dataclass(slots=True, eq=False)
class RankProgram:
    """A function for inputs of certain shapes, as this process runs it."""

    name: str
    """The registered function; the original one if nothing is divided."""
    label: str
    """The original function's name, without the number of its trace."""
    placed: Placed | None = None
    written: Written | None = None
    xla: Compiled | None = None
    """What of it XLA compiles, if the function is written anew."""
    seconds: dict[str, float] = field(default_factory=dict)
    """What making it took, by pass."""
    parts: dict[int, RowPart] = field(default_factory=dict)
    """The outputs that are parts."""
    variables: dict[int, Shard] = field(default_factory=dict)
    """The inputs that are variables of which it gets a piece."""
    error: Exception | None = None
    """Why the function cannot be divided, if that was tried in vain."""
    function: str = ""
    """The original function's name."""
    on_own_rows: bool = False
    """Whether it trains on this rank's rows alone, without exchanges."""
    assigns: bool = False
    """Whether it assigns variables."""
    is_noted: bool = False
    """Whether it is among the hook's programs."""
    trains: bool = False
    """Whether the program seems to train: it computes gradients."""

    @property
    def is_divided(self) -> bool:
        return self.placed is not None and self.placed.exchanges()

    @property
    def is_of_tape(self) -> bool:
        """Whether it computes gradients for a tape outside of functions."""
        return self.label.startswith(_BACKWARD)


class Programs:
    """All programs of one function.

    Only the first ``visible`` outputs are seen by anybody but by other functions. With
    ``own_rows``, functions that train exchange nothing. With ``divides_variables``,
    those that train get pieces of an optimizer's variables.
    """

    def __init__(
        self,
        function: Function,
        ranks: Ranks,
        new_exchanger: Callable[[str], Exchanger] | None,
        new_seed: Callable[[], int],
        variable_names: VariableNames = dict,
        visible: int | None = None,
        own_rows: OwnRows | None = None,
        divides_variables: bool = False,
    ) -> None:
        self.function = function
        self._own_rows = own_rows
        self._divides_variables = divides_variables
        self.fetches: list[TakenElement] = fetches_of(function)
        self._ranks = ranks
        self._new_exchanger = new_exchanger
        self._draws = Draws(new_seed)
        self._variable_names = variable_names
        self._visible = visible
        self._programs: dict[Key, RankProgram] = {}
        self._names = list(function.arguments)
        """What messages call the inputs."""
        self._variables: list[Watched] | None = None
        self._taken_rows: int | None = None
        """The size of the first batch that a loop of the function took."""
        self._note = HostFunction(self._note_size)
        self._without_batches: RankProgram | None = None
        self._draws_by_itself: bool | None = None
        """Whether it holds random ops with states; None if nobody has asked."""

    @property
    def label(self) -> str:
        """The function's name without the number of its trace, which ranks may not
        share."""
        return _TRACE.sub("", self.function.name)

    @property
    def is_unused(self) -> bool:
        """Whether no program was made yet."""
        return not self._programs and self._without_batches is None

    def _note_size(self, size: Array) -> list[Array]:
        if self._taken_rows is None and int(size) >= self._ranks.size:
            self._taken_rows = int(size)
        return []

    def data_places(self, inputs: Sequence[ProgramInput]) -> list[int]:
        """The places of the program's data among its inputs and batches.

        These are equal on all ranks: neither variables, nor arrays that the function
        has captured, nor parts.
        """
        arguments = len(self.function.arguments)
        return [
            place
            for place, value in enumerate(inputs)
            if value.is_data
            and value.part is None
            and (place >= arguments or self._is_named(place))
        ]

    def variables(self, inputs: Sequence[ProgramInput]) -> list[Watched]:
        """The variables among the inputs: one list while they are the same."""
        variables = self._variables
        if variables is None or any(
            variable.handle is not inputs[variable.place].tensor
            for variable in variables
        ):
            own = inputs[: len(self.function.arguments)]
            tensors = [value.tensor for value in own]
            names = self._variable_names()
            variables = self._variables = watched(self._names, tensors, names)
        return variables

    def batch_places(self, inputs: Sequence[ProgramInput]) -> list[int]:
        """The places of the tensors that have the rows of a batch as first dimension.

        A batch is what the function takes, or else an argument.
        """
        arguments = len(self.function.arguments)
        fetched = list(range(arguments, len(inputs)))
        named = [place for place in range(arguments) if self._is_named(place)]
        for places in (fetched, named):
            rows = _most_rows((inputs[place] for place in places), 1)
            if rows is not None:
                return [
                    place
                    for place in (*fetched, *named)
                    if inputs[place].part is None
                    and inputs[place].tensor.dtype not in _HANDLES
                    and inputs[place].shape[:1] == (rows,)
                ]
        return []

    def _is_named(self, place: int) -> bool:
        attributes = self.function.definition.arg_attr
        return place in attributes and "_user_specified_name" in attributes[place].attr

    def program(
        self, inputs: Sequence[ProgramInput], *, keeps_parts: bool = False
    ) -> RankProgram:
        """The program for inputs and batches, in this order, of these shapes.

        With ``keeps_parts``, any of its outputs may stay a part. Call it each time
        before the program runs. Raises CollectiveError if the ranks cannot be
        connected.
        """
        visible = 0 if keeps_parts else self._visible
        self._draws.begin()
        shapes = tuple(
            value.placement
            if value.tensor.dtype == tf.resource
            else (value.tensor.dtype, value.shape, value.shard)
            for value in inputs
        )
        key = self._taken_rows, visible, shapes
        program = self._programs.get(key)
        if program is None:
            program = self._divided_or_whole(inputs, self.fetches, visible)
            self._programs[key] = program
        return program

    def without_batches(self, inputs: Sequence[ProgramInput]) -> RankProgram:
        """The program that takes batches itself, and is not divided.

        Its random ops continue the sequences of the other programs.
        """
        if self._draws_by_itself is None:
            self._draws_by_itself = not WITH_STATE.isdisjoint(op_types(self.function))
        has_tables = any(value.table is not None for value in inputs)
        if not self._draws_by_itself and not has_tables:
            return RankProgram(self.function.name, self.label)
        self._draws.begin()
        if self._without_batches is None:
            self._without_batches = self._divided_or_whole(inputs, (), self._visible)
        return self._without_batches

    def _divided_or_whole(
        self,
        inputs: Sequence[ProgramInput],
        fetches: Sequence[TakenElement],
        visible: int | None,
    ) -> RankProgram:
        try:
            program = self._divided(inputs, fetches, visible)
        except CollectiveError:
            raise
        except Exception as error:
            # Whatever it is: the function itself computes what one machine computes.
            program = RankProgram(self.function.name, self.label, error=error)
        program.function = self.function.name
        return program

    def _divided(
        self,
        inputs: Sequence[ProgramInput],
        fetches: Sequence[TakenElement],
        visible: int | None,
    ) -> RankProgram:
        """The program to which ``fetches`` are given."""
        clock, seconds = time.perf_counter, {}
        began = clock()
        arguments = [value.argument() for value in inputs]
        rest = arguments[len(self.function.arguments) :]
        batches = {}
        for fetch in fetches:
            count = len(fetch.types)
            batches[fetch.path], rest = rest[:count], rest[count:]
        own = arguments[: len(self.function.arguments)]
        taken = Taken(
            self._taken_rows, self._ranks.size, self._note, takes_of(self.function)
        )
        graph = specialise(self.function, own, batches, taken)
        self._names = _names_of(graph)[: len(own)]
        pairs = zip(graph.inputs, inputs, strict=True)
        divided = [value for value, given in pairs if given.table is not None]
        gather_from_handles(graph, divided)
        seconds["specialise"] = clock() - began
        began = clock()
        trains = any("gradient_tape/" in node.name for node in graph.all_nodes())
        rows, placements = self._placements(inputs)
        variables: VariableShards = {}
        if len(fetches) < len(self.fetches):
            tables = [value.table and value.placement for value in inputs]
            rows, placements = None, [table or REPLICATE for table in tables]
        elif self._divides_variables and trains:
            variables = {
                variable: shard
                for variable, shard in candidates(graph, self._ranks.size).items()
                if variable not in divided
            }
        placed = propagate(graph, placements, rows, variables)
        seconds["propagate"] = clock() - began
        of_tape = self.label.startswith(_OF_TAPES)
        alone = self._own_rows is not None and (of_tape or trains)
        must_be_written = any(
            is_stateful_draw(node) or self._is_note(node) or is_in_order(node)
            for node in graph.all_nodes()
        )
        program = RankProgram(self.function.name, self.label, placed, seconds=seconds)
        program.on_own_rows, program.trains = alone, trains
        program.assigns = any(n.type.startswith(CHANGES) for n in graph.all_nodes())
        if not placed.exchanges() and not must_be_written and not fetches:
            return program
        began = clock()
        exchanger: Exchanger | None = self._own_rows if alone else None
        if not alone and self._new_exchanger is not None:
            exchanger = self._new_exchanger(self.label)
        written = rewrite(
            placed,
            f"{self.function.name}_rank",
            self._ranks,
            exchanger,
            self._draws,
            [
                tf_functions.handle_data(value.tensor)
                if value.tensor.dtype in _HANDLES
                else None
                for value in inputs
            ],
            [
                held if isinstance(held, HandleOf) else value.placement or REPLICATE
                for held, value in zip(placed.inputs, inputs, strict=True)
            ],
            visible,
        )
        seconds["rewrite"] = clock() - began
        began = clock()
        pieces = len(self._ranks.splits)
        program.xla = compiled(
            written,
            [
                tensor
                for held, given in zip(placed.inputs, inputs, strict=True)
                for tensor in given.held(held, pieces)
            ],
        )
        written = program.xla.written
        tf_functions.register(written.definitions[0])
        seconds["compile"] = clock() - began
        program.name, program.written = written.name, written
        placements = returned(placed, self._ranks, visible)
        outputs = zip(placements, graph.outputs, strict=True)
        for index, (placement, output) in enumerate(outputs):
            if isinstance(placement, Shard) and output.shape is not None:
                program.parts[index] = RowPart(placement, output.shape)
        for place, (held, given) in enumerate(zip(placed.inputs, inputs, strict=True)):
            if isinstance(held, HandleOf) and given.table is None:
                program.variables[place] = held.element
        return program

    def forget(self) -> list[RankProgram]:
        """Remove the definitions of all programs; returns the programs."""
        programs = [*self._programs.values(), *filter(None, [self._without_batches])]
        for program in programs:
            if program.written is not None:
                tf_functions.forget(program.written.name)
        return programs

    def takes_batches(self, program: RankProgram) -> bool:
        """Whether a loop of the program takes batches, whose size it tells."""
        return program.placed is not None and any(
            map(self._is_note, program.placed.graph.all_nodes())
        )

    def _is_note(self, node: Node) -> bool:
        token = node.attribute("token") if node.type == "PyFunc" else None
        return token == self._note.token.encode()

    def _placements(
        self, inputs: Sequence[ProgramInput]
    ) -> tuple[int | None, Sequence[Placement]]:
        """The number of rows, and the placements of inputs and batches.

        The rows are those of parts; without any, those of the largest batch; without
        one, of the largest argument; without one, of the largest array that the
        function has captured. To divide other tensors would not be wrong, only slower.
        """
        rows = self._rows(inputs)
        return rows, [
            value.placement
            or (
                Shard(0, rows)
                if rows is not None and value.is_data and value.shape[:1] == (rows,)
                else REPLICATE
            )
            for value in inputs
        ]

    def _rows(self, inputs: Sequence[ProgramInput]) -> int | None:
        for value in inputs:
            if value.part is not None:
                return value.part.shard.rows
        arguments = inputs[: len(self.function.arguments)]
        named = [value for i, value in enumerate(arguments) if self._is_named(i)]
        for chosen in (inputs[len(arguments) :], named, arguments):
            rows = _most_rows(chosen, max(self._ranks.size, 2))
            if rows is not None:
                return rows
        return None


def _names_of(graph: OpGraph) -> list[str]:
    """Names for the inputs of a graph; those of variables are where they are read."""
    names = {value: value.node.name for value in graph.inputs}
    for node in reversed(graph.nodes):
        if node.type == "ReadVariableOp" and node.inputs[0] in names:
            names[node.inputs[0]] = _READING.sub("", node.name)
    return [names[value] for value in graph.inputs]


def gather(
    parts: Sequence[ProgramInput],
    ranks: Ranks,
    new_exchanger: Callable[[str], Exchanger] | None,
) -> Written:
    """A function that gets these parts, and returns the whole tensors."""
    graph = ShapeGraph()
    values = graph.arguments([part.argument() for part in parts])
    placements = [part.shard or REPLICATE for part in parts]
    rows = next(
        (placement.rows for placement in placements if isinstance(placement, Shard)),
        None,
    )
    written = rewrite(
        propagate(graph.finished(values), placements, rows),
        "tfcluster_gather",
        ranks,
        None if new_exchanger is None else new_exchanger("gather"),
        Draws(lambda: 0),
        input_placements=placements,
    )
    tf_functions.register(written.definitions[0])
    return written


def _most_rows(inputs: Iterable[ProgramInput], least: int) -> int | None:
    sizes: dict[int, int] = {}
    for value in inputs:
        if value.is_data and value.shape:
            rows, nbytes = value.shape[0], elements_of(value.shape)
            if rows is not None and rows >= least:
                size = (nbytes or 0) * value.tensor.dtype.size
                sizes[rows] = sizes.get(rows, 0) + size
    return max(sizes, key=lambda rows: sizes[rows]) if sizes else None
