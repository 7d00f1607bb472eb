"""Finds out how functions would be divided, while they run unchanged in one process."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from tfcluster.runtime.partition import tf_datasets
from tfcluster.runtime.partition.exchange import BUCKET_BYTES, ExchangeRequest
from tfcluster.runtime.partition.explain import (
    FunctionReport,
    LoopPipeline,
    ReadPipeline,
    assigned_of,
    explained,
)
from tfcluster.runtime.partition.functions import all_nodes
from tfcluster.runtime.partition.hook import Call, Hook
from tfcluster.runtime.partition.input_pipelines import NO_BATCHES, divided
from tfcluster.runtime.partition.placement import Ranks
from tfcluster.runtime.partition.program_inputs import ProgramInput
from tfcluster.runtime.partition.programs import Programs, RankProgram
from tfcluster.runtime.partition.taken_batches import TakenElement, handed
from tfcluster.runtime.partition.writer import OpWriter, Ref
from tfcluster.runtime.telemetry.stack_dump import program_line
from tfcluster.runtime.tensor_types import Dataset, Nest, Tensor

_MOST_STEPS = 8
"""Of a function that trains and whose batches have another shape in each step."""


class EndOfStep(SystemExit):
    """Ends the program once a whole step has been seen. Its exit code is 0."""

    def __init__(self) -> None:
        super().__init__(0)


class ExplainHook(Hook):
    """Makes the program of rank 0 of ``size`` for each function, and runs none of them.

    A function that trains raises EndOfStep when it is called again: then all functions
    of a step have been called.
    """

    def __init__(self, size: int) -> None:
        super().__init__(Ranks(size, (0,)), lambda label: _UnusedExchanger())
        self.functions: list[FunctionReport] = []
        """What was found out about each of ``programs``."""
        self._datasets: dict[int, tuple[object, Dataset, bool]] = {}
        """By the ``id`` of the resource of an iterator: with a reference that ends the
        entry, its dataset, and whether Keras reads it."""
        self._steps: dict[str, int] = {}
        """How often functions that train were called, by their labels."""
        self._loops: dict[int, LoopPipeline] = {}
        """By the ``id`` of the iterator's resource, unless a function reads from it."""

    @property
    def loops(self) -> list[LoopPipeline]:
        """The datasets over which Python iterates, itself."""
        return list(dict.fromkeys(self._loops.values()))

    def call(
        self,
        original: Call,
        context: Any,
        name: bytes | str,
        inputs: Sequence[Tensor],
        outputs: int,
    ) -> Any:
        """See ``Hook.call``."""
        text = name.decode() if isinstance(name, bytes) else name
        if self._stands_aside():
            return original(context, name, inputs, outputs)
        self._busy.now = True
        try:
            programs = self._programs.of(text)
            if programs is None:
                return original(context, name, inputs, outputs)
            taken: list[Tensor] = []
            try:
                for fetch in programs.fetches:
                    taken += fetch.next(inputs)
            except tf.errors.OutOfRangeError:
                rest = handed(programs.fetches, taken, inputs)
                return original(context, name, rest, outputs)
            values = [self._input(tensor) for tensor in inputs]
            values += [ProgramInput(tensor) for tensor in taken]
            program = programs.program(values)
            if _trains(programs, program):
                self._end_if_seen(program)
            if programs.takes_batches(program) and not program.is_divided:
                # It is as good as the function, and tells how large a batch is.
                tensors = [value.tensor for value in values]
                result = original(context, program.name.encode(), tensors, outputs)
                program = programs.program(values)
            else:
                rest = handed(programs.fetches, taken, inputs)
                result = original(context, name, rest, outputs)
            if program not in self.programs:
                self.programs.append(program)
                # Now, since TensorFlow forgets the lines with the function.
                pipelines = self._pipelines(programs.fetches, inputs)
                report = replace(explained(program), pipelines=pipelines)
                if program.trains and program.placed is not None:
                    names = {v.place: v.name for v in programs.variables(values)}
                    assigned = assigned_of(program.placed, names, self._ranks.size)
                    report = replace(report, assigned=assigned)
                self.functions.append(report)
            for index, part in program.parts.items():
                self._parts.note(result[index], part)
            return result
        finally:
            self._busy.now = False

    def iterate(
        self, original: Callable[[Dataset], Iterator[Nest]], dataset: Dataset
    ) -> Iterator[Nest]:
        """Create an iterator over ``dataset``, and note whose it is."""
        iterator = original(dataset)
        if tf.executing_eagerly():
            resource = tf_datasets.resource_of(iterator)
            key, datasets = id(resource), self._datasets
            is_of_keras = _is_called_by_keras()
            ends = weakref.ref(resource, lambda _: datasets.pop(key, None))
            datasets[key] = ends, dataset, is_of_keras
            found = self._read(dataset)
            if not is_of_keras and found.reason != NO_BATCHES:
                divides = found.divided
                line = program_line()
                reason = _OWN_LOOP if divides else found.reason
                self._loops[key] = LoopPipeline(divides, reason, line or None)
        return iterator

    def _read(self, dataset: Dataset) -> ReadPipeline:
        (split,) = self._ranks.splits
        pipeline = divided(dataset, split)
        reason = pipeline if isinstance(pipeline, str) else None
        return ReadPipeline(reason is None, reason)

    def _pipelines(
        self, fetches: Sequence[TakenElement], inputs: Sequence[Tensor]
    ) -> list[ReadPipeline]:
        """The datasets from which a function with these inputs takes batches."""
        read = []
        taken = {id(inputs[fetch.iterator]) for fetch in fetches}
        for key in map(id, inputs):
            if key not in self._datasets:
                continue
            self._loops.pop(key, None)
            _, dataset, is_of_keras = self._datasets[key]
            found = self._read(dataset)
            if found.reason == NO_BATCHES:
                continue
            if found.divided and key not in taken:
                found = ReadPipeline(divided=False, reason=_SEVERAL)
            elif found.divided and not is_of_keras:
                found = replace(found, reason=_OWN_LOOP)
            read.append(found)
        return read

    def _end_if_seen(self, program: RankProgram) -> None:
        """Raise EndOfStep if a function that trains is called again."""
        before = self._steps.get(program.label, 0)
        if program in self.programs or before >= _MOST_STEPS:
            raise EndOfStep
        self._steps[program.label] = before + 1


_SEVERAL = "the function takes several batches (steps_per_execution, or a loop)"
_OWN_LOOP = "the ranks of each host divide the batches"


def _is_called_by_keras() -> bool:
    frame = inspect.currentframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("keras."):
            return True
        frame = frame.f_back
    return False


def _trains(programs: Programs, program: RankProgram) -> bool:
    if program.trains or program.is_of_tape:
        return True
    if program.placed is not None:
        return False
    nodes = all_nodes(programs.function)
    return any("gradient_tape/" in node.name for node in nodes)


class _UnusedExchanger:
    """Writes exchanges of programs that never run; see ``exchange.Exchanger``."""

    bucket_bytes = BUCKET_BYTES
    scatters = True
    words = ()

    def write(self, writer: OpWriter, requests: Sequence[ExchangeRequest]) -> list[Ref]:
        types = [request.ref.dtype for request in requests]
        refs = [request.ref for request in requests]
        return writer.op("PyFunc", [refs], {"token": "", "Tout": types}, "exchange")
