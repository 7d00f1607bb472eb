"""Recognises random arrays whose length has nothing to do with a batch's rows.

If a step is traced for batches of one size, or runs eagerly, the number of rows is a
number like any other: 64 may be 16 numbers for each of 4 rows, or a size that the
program chose. But ranks trace and run a step for several numbers of rows: for the whole
batch first, or for a trial, and then for their parts. A length that stays the same does
not depend on the rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import tensorflow as tf

from tfcluster.runtime import contract, tf_internals
from tfcluster.runtime.keras.inner_functions import InnerFunctions
from tfcluster.runtime.keras.program_lines import user_line


class ArrayLengths:
    """Remembers for how many rows each line of a step drew how many numbers."""

    def __init__(self, functions: InnerFunctions) -> None:
        self._functions = functions
        self._rows: dict[Hashable, int] = {}
        """By place and length: the rank's rows when it was drawn first."""
        self._fixed: set[Hashable] = set()
        self._step: object = None
        self._drawn: Counter[str] = Counter()
        """How often each line has drawn in the eager step ``_step``."""

    def is_fixed(
        self, rows: int, length: int, step: object, *, known: bool = False
    ) -> bool:
        """Whether this place drew ``length`` numbers for another number of rows, too.

        ``rows`` is the number of rows that this rank has in the step. ``step``
        identifies an eager step. ``known``: other ranks draw as many now.
        """
        draw = *self._place(step), length
        if known or self._rows.setdefault(draw, rows) != rows:
            self._fixed.add(draw)
        return draw in self._fixed

    def _place(self, step: object) -> tuple[Hashable, ...]:
        """Identifies a call in the program that draws, in each step or trace."""
        line = user_line()
        if tf.executing_eagerly():
            if step is not self._step:
                self._step = step
                self._drawn.clear()
            drawn = self._drawn
        else:
            graph = tf_internals.function_graph()
            drawn = contract.attached(graph, "_tfcluster_drawn", Counter[str])
        drawn[line] += 1
        return *self._functions.place, line, drawn[line]
