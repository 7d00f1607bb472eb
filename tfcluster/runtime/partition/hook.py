"""Where functions run eagerly: there, the program for the ranks runs instead."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfcluster.runtime.partition.exchange import Exchanger
from tfcluster.runtime.partition.functions import function_named
from tfcluster.runtime.partition.programs import Program, Programs
from tfcluster.runtime.partition.rewrite import Ranks
from tfcluster.runtime.tensor_types import Tensor

Call = Callable[[Any, Any, Sequence[Tensor], int], Any]
"""``Context.call_function``: its context, a function's name, inputs, output count."""


class Agree(Protocol):
    """Compares what all ranks are about to run; see ``agreement.Agreement.on``."""

    def __call__(self, program: str, inputs: Sequence[Tensor]) -> list[Tensor]: ...


class Hook:
    """Runs programs in place of functions.

    Only calls by the main thread are divided, and none from within a program: so all
    ranks divide the same calls. While ``is_paused()`` nothing is divided, since other
    ranks may not be calling the function. ``ran`` is called after each program.
    """

    def __init__(
        self,
        ranks: Ranks,
        new_exchanger: Callable[[str], Exchanger] | None = None,
        *,
        seed: int = 0,
        strict: bool = False,
        agree: Agree | None = None,
        is_paused: Callable[[], bool] = lambda: False,
        ran: Callable[[Program], None] = lambda program: None,
    ) -> None:
        self._ranks = ranks
        self._new_exchanger = new_exchanger
        self._seeds = random.Random(seed)
        self._strict = strict
        self._agree = agree
        self._is_paused = is_paused
        self._ran = ran
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
        if self._stands_aside() or text.startswith(_OF_TAPES):
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
            if self._agree is not None and program.is_divided:
                inputs, fetched = self._agreed(programs, inputs, fetched)
                program = programs.program(inputs, fetched)
            result = original(
                context, program.name.encode(), [*inputs, *fetched], outputs
            )
            self._ran(program)
            return result
        finally:
            self._busy.now = False

    def _stands_aside(self) -> bool:
        return (
            getattr(self._busy, "now", False)
            or threading.current_thread() is not threading.main_thread()
            or self._is_paused()
        )

    def _agreed(
        self, programs: Programs, inputs: Sequence[Tensor], fetched: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The inputs and batches with which all ranks continue."""
        every = [*inputs, *fetched]
        assert self._agree is not None
        places = programs.data_places(every)
        found = self._agree(programs.label, [every[place] for place in places])
        for place, tensor in zip(places, found, strict=True):
            every[place] = tensor
        return every[: len(inputs)], every[len(inputs) :]

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
            sys.stderr.write(f"tfcluster: {programs.function.name}: {error}")
            return None
        if program not in self.programs:
            self.programs.append(program)
        return program

    def _new_seed(self) -> int:
        return self._seeds.getrandbits(62) + 1


_OF_TAPES = ("__forward_", "__backward_")
