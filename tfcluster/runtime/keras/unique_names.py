"""Names of objects that are equal on all ranks."""

from __future__ import annotations

import weakref
from collections import Counter

from tfcluster.runtime.keras.types import Optimizer


class UniqueNames:
    """Gives each name once: the second ``adam`` is ``adam (2)``.

    A name is never given again, not even when its object is gone: Python frees objects
    at different times on different ranks, and all ranks must use the same names.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def new(self, name: str) -> str:
        """Return ``name``, followed by a number if it was given before."""
        self._counts[name] += 1
        count = self._counts[name]
        return name if count == 1 else f"{name} ({count})"


class OptimizerNames:
    """The names of optimizers, in the order in which the program uses them."""

    def __init__(self) -> None:
        self._unique = UniqueNames()
        self._names: weakref.WeakKeyDictionary[Optimizer, str] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, optimizer: Optimizer) -> str:
        """The name of ``optimizer``; the first call determines it."""
        if optimizer not in self._names:
            self._names[optimizer] = self._unique.new(optimizer.name)
        return self._names[optimizer]
