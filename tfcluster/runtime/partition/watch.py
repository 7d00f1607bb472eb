"""Finds out how functions would be divided, while they run unchanged in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfcluster.runtime.partition.exchange import BUCKET_BYTES, ExchangeRequest
from tfcluster.runtime.partition.explain import FunctionReport, explained
from tfcluster.runtime.partition.functions import all_nodes
from tfcluster.runtime.partition.hook import Call, Hook
from tfcluster.runtime.partition.placement import Ranks
from tfcluster.runtime.partition.programs import ProgramInput, Programs, RankProgram
from tfcluster.runtime.partition.taken_batches import handed
from tfcluster.runtime.partition.writer import OpWriter, Ref
from tfcluster.runtime.tensor_types import Tensor

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
        self._steps: dict[str, int] = {}
        """How often functions that train were called, by their labels."""

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
            programs = self._programs_of(text)
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
                self.functions.append(explained(program))
            for index, part in program.parts.items():
                self._note_part(result[index], part)
            return result
        finally:
            self._busy.now = False

    def _end_if_seen(self, program: RankProgram) -> None:
        """Raise EndOfStep if a function that trains is called again."""
        before = self._steps.get(program.label, 0)
        if program in self.programs or before >= _MOST_STEPS:
            raise EndOfStep
        self._steps[program.label] = before + 1


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
