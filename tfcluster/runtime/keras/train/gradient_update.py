"""The protocol of a strategy: what it does with a rank's gradients."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from tfcluster.runtime.keras.types import Optimizer, Variable
from tfcluster.runtime.tensor_types import Gradient


class GradientUpdate(Protocol):
    """Runs before and after ``Optimizer.apply``, eagerly and while a step is traced.

    ``state`` has the variables that layers update from their data.
    """

    def before(
        self,
        optimizer: Optimizer,
        gradients: Sequence[Gradient],
        variables: Sequence[Variable],
        state: Sequence[Any],
    ) -> list[Any] | None:
        """Return what this rank's optimizer applies instead of ``gradients``.

        Each is None, a tensor or IndexedSlices, one per variable. Returns None if the
        variables have their new values already and the optimizer must not run.
        """
        ...

    def after(
        self, optimizer: Optimizer, variables: Sequence[Variable], state: Sequence[Any]
    ) -> None:
        """Called after the optimizer has applied the result of ``before``."""
        ...

    def settle(self, what: str) -> None:
        """Make the weights equal on all ranks before they are saved or evaluated.

        Called outside of steps by all ranks at the same place, which ``what`` names.
        """
        ...


class OptimizerNames:
    """Names of optimizers, equal on all ranks; the second ``adam`` is ``adam (2)``."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._counts: Counter[str] = Counter()

    def of(self, optimizer: Optimizer) -> str:
        """The name of ``optimizer``; the first call determines it."""
        if optimizer not in self._names:
            name = optimizer.name
            self._counts[name] += 1
            count = self._counts[name]
            self._names[optimizer] = name if count == 1 else f"{name} ({count})"
        return self._names[optimizer]
