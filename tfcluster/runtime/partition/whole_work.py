"""Warns of functions whose work is not divided."""

from __future__ import annotations

from collections.abc import Callable

from tfcluster.runtime.partition.explain import mostly_whole
from tfcluster.runtime.partition.programs import RankProgram


class WholeWork:
    """Warns once of each function whose work is mostly computed by every rank."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._undivided: set[str] = set()
        self._judged: set[str] = set()

    def ran(self, program: RankProgram) -> None:
        """Called after each program."""
        if program.label in self._judged:
            return
        # The first batch that a loop takes is computed whole, and tells its size.
        if not program.is_divided and program.function not in self._undivided:
            self._undivided.add(program.function)
            return
        self._judged.add(program.label)
        sentence = mostly_whole([program])
        if sentence is not None:
            self._warn(sentence)
