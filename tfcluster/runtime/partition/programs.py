"""A function's programs: its definitions for the ranks, by the shapes of its inputs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import tensorflow as tf

from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.draws import Draws
from tfcluster.runtime.partition.exchange import Exchanger
from tfcluster.runtime.partition.fetches import Fetch, fetches_of
from tfcluster.runtime.partition.functions import Function
from tfcluster.runtime.partition.placement import REPLICATE, Placement, Shard
from tfcluster.runtime.partition.placement import Shape as Sizes
from tfcluster.runtime.partition.propagate import Placed, propagate
from tfcluster.runtime.partition.rewrite import Ranks, Written, rewrite
from tfcluster.runtime.partition.rules.random import is_stateful_draw
from tfcluster.runtime.partition.specialise import Argument, specialise
from tfcluster.runtime.tensor_types import DType, Tensor

Key: TypeAlias = tuple[tuple[DType, Sizes] | None, ...]


@dataclass(slots=True)
class Program:
    """A function for inputs of certain shapes, as this process runs it."""

    name: str
    """The registered function; the original one if nothing is divided."""
    label: str
    """The original function's name, without the number of its trace."""
    placed: Placed | None = None
    written: Written | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """What making it took, by pass."""
    _trains: bool | None = None

    @property
    def is_divided(self) -> bool:
        return self.placed is not None and self.placed.exchanges()

    @property
    def trains(self) -> bool:
        """Whether the program seems to train: it computes gradients."""
        if self._trains is None:
            graph = None if self.placed is None else self.placed.graph
            nodes = () if graph is None else graph.nodes
            self._trains = any("gradient_tape/" in node.name for node in nodes)
        return self._trains


class Programs:
    """All programs of one function."""

    def __init__(
        self,
        function: Function,
        ranks: Ranks,
        new_exchanger: Callable[[str], Exchanger] | None,
        new_seed: Callable[[], int],
    ) -> None:
        self.function = function
        self.fetches: list[Fetch] = fetches_of(function)
        self._ranks = ranks
        self._new_exchanger = new_exchanger
        self._draws = Draws(new_seed)
        self._programs: dict[Key, Program] = {}

    @property
    def label(self) -> str:
        """The function's name without the number of its trace, which ranks may not
        share."""
        return _TRACE.sub("", self.function.name)

    def data_places(self, tensors: Sequence[Tensor]) -> list[int]:
        """The places of the program's data among its inputs and batches.

        These are numbers; neither variables nor arrays that the function has captured.
        """
        arguments = len(self.function.arguments)
        return [
            place
            for place, tensor in enumerate(tensors)
            if tensor.dtype not in _WITHOUT_ROWS
            and (place >= arguments or self._is_named(place))
        ]

    def _is_named(self, place: int) -> bool:
        given = self.function.definition.arg_attr
        return place in given and "_user_specified_name" in given[place].attr

    def __iter__(self) -> object:
        return iter(self._programs.values())

    def program(self, inputs: Sequence[Tensor], fetched: Sequence[Tensor]) -> Program:
        """The program for inputs and batches of these shapes."""
        key = tuple(map(_key, (*inputs, *fetched)))
        found = self._programs.get(key)
        if found is None:
            found = self._programs[key] = self._made(inputs, fetched)
        return found

    def _made(self, inputs: Sequence[Tensor], fetched: Sequence[Tensor]) -> Program:
        rows, divided = self._rows(inputs, fetched)
        clock, seconds = time.perf_counter, {}
        began = clock()
        arguments = [Argument.of(each) for each in inputs]
        batches = {}
        rest = list(fetched)
        for fetch in self.fetches:
            count = len(fetch.types)
            batches[fetch.path] = [Argument.of(each) for each in rest[:count]]
            rest = rest[count:]
        graph = specialise(self.function, arguments, batches)
        seconds["specialise"] = clock() - began
        began = clock()
        placements: list[Placement] = [
            Shard(0, rows) if is_divided and rows is not None else REPLICATE
            for is_divided in divided
        ]
        placed = propagate(graph, placements, rows)
        seconds["propagate"] = clock() - began
        if not placed.exchanges() and not any(
            is_stateful_draw(node) for node in graph.all_nodes()
        ):
            return Program(self.function.name, self.label, placed, None, seconds)
        began = clock()
        exchanger = (
            self._new_exchanger(self.label) if self._new_exchanger is not None else None
        )
        tensors = (*inputs, *fetched)
        handles = [
            tf_functions.handle_data(each)
            if each.dtype in (tf.resource, tf.variant)
            else None
            for each in tensors
        ]
        written = rewrite(
            placed,
            f"{self.function.name}_rank",
            self._ranks,
            exchanger,
            self._draws,
            handles,
        )
        tf_functions.register(written.definitions[0])
        seconds["rewrite"] = clock() - began
        return Program(written.name, self.label, placed, written, seconds)

    def _rows(
        self, inputs: Sequence[Tensor], fetched: Sequence[Tensor]
    ) -> tuple[int | None, list[bool]]:
        """The number of rows, and which inputs and batches have that many.

        The rows are those of the largest batch; without one, of the largest argument;
        without one, of the largest array that the function has captured. To divide
        other tensors would not be wrong, only slower.
        """
        named = [self._is_named(place) for place in range(len(inputs))]
        arguments = [t for t, own in zip(inputs, named, strict=True) if own]
        captured = [t for t, own in zip(inputs, named, strict=True) if not own]
        for candidates in (fetched, arguments, captured):
            rows = _most_rows(candidates, self._ranks.size)
            if rows is not None:
                taken = [has_rows(t, rows) for t in (*inputs, *fetched)]
                return rows, taken
        return None, [False] * (len(inputs) + len(fetched))


def _most_rows(tensors: Sequence[Tensor], least: int) -> int | None:
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor.dtype not in _WITHOUT_ROWS and tensor.shape.rank:
            rows = int(tensor.shape[0])
            nbytes = int(tensor.shape.num_elements() or 0) * tensor.dtype.size
            if rows >= max(least, 2):
                sizes[rows] = sizes.get(rows, 0) + nbytes
    return max(sizes, key=lambda rows: sizes[rows]) if sizes else None


def has_rows(tensor: Tensor, rows: int) -> bool:
    """Whether the tensor's first dimension has that size."""
    if tensor.dtype in _WITHOUT_ROWS or not tensor.shape.rank:
        return False
    return bool(tensor.shape[0] == rows)


_TRACE = re.compile(r"^__inference_|_\d+$")
_WITHOUT_ROWS = (tf.resource, tf.variant, tf.string)


def _key(tensor: Tensor) -> tuple[DType, Sizes] | None:
    if tensor.dtype in (tf.resource, tf.variant):
        return None
    return tensor.dtype, tuple(tensor.shape)
