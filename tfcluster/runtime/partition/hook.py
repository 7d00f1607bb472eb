"""Where functions run eagerly: there, the program for the ranks runs instead."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfcluster.runtime.partition.exchange import Exchanger
from tfcluster.runtime.partition.functions import function_named
from tfcluster.runtime.partition.programs import Program, Programs
from tfcluster.runtime.partition.rewrite import Ranks
from tfcluster.runtime.tensor_types import Tensor

Call = Callable[[Any, Any, Sequence[Tensor], int], Any]
"""``Context.call_function``: its context, a function's name, inputs, output count."""


class Hook:
    """Runs programs in place of functions."""

    def __init__(
        self,
        ranks: Ranks,
        new_exchanger: Callable[[str], Exchanger] | None = None,
        *,
        seed: int = 0,
        strict: bool = False,
    ) -> None:
        self._ranks = ranks
        self._new_exchanger = new_exchanger
        self._seeds = random.Random(seed)
        self._strict = strict
        self._functions: dict[str, Programs | None] = {}
        self._busy = threading.local()
        self.programs: list[Program] = []
        """All that have run, in the order of their first run."""

    def call(
        self,
        original: Call,
        context: Any,
        name: bytes | str,
        inputs: Sequence[Tensor],
        outputs: int,
    ) -> Any:
        """See ``Call``."""
        text = name.decode() if isinstance(name, bytes) else name
        if getattr(self._busy, "now", False) or text.startswith(_OF_TAPES):
            return original(context, name, inputs, outputs)
        self._busy.now = True
        try:
            programs = self._programs_of(text)
            if programs is None:
                return original(context, name, inputs, outputs)
            try:
                fetched = [t for f in programs.fetches for t in f.next(inputs)]
            except tf.errors.OutOfRangeError:
                # The function itself does what does not wait for the batch.
                return original(context, name, inputs, outputs)
            program = self._program(programs, inputs, fetched)
            if program is None or program.written is None:
                if not fetched:
                    return original(context, name, inputs, outputs)
                raise NotImplementedError(f"{text} cannot be run whole")
            return original(
                context, program.name.encode(), [*inputs, *fetched], outputs
            )
        finally:
            self._busy.now = False

    def _programs_of(self, name: str) -> Programs | None:
        if name not in self._functions:
            function = function_named(name)
            self._functions[name] = (
                None
                if function is None
                else Programs(
                    function, self._ranks, self._new_exchanger, self._new_seed
                )
            )
        return self._functions[name]

    def _program(
        self, programs: Programs, inputs: Sequence[Tensor], fetched: Sequence[Tensor]
    ) -> Program | None:
        try:
            program = programs.program(inputs, fetched)
        except Exception as error:
            if self._strict:
                raise
            print(f"tfcluster: {programs.function.name}: {error}", file=sys.stderr)
            return None
        if program not in self.programs:
            self.programs.append(program)
        return program

    def _new_seed(self) -> int:
        return self._seeds.getrandbits(62) + 1


_OF_TAPES = ("__forward_", "__backward_")
