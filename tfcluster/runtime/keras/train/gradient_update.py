"""What a strategy makes of a rank's gradients."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol


class GradientUpdate(Protocol):
    """Stands around ``Optimizer.apply``, eagerly and while a step is traced.

    ``state`` are those variables that layers set from the data that they see.
    """

    def before(
        self,
        optimizer: Any,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        state: Sequence[Any],
    ) -> list[Any] | None:
        """What the optimizer of this rank is to apply, in place of ``gradients``.

        Each is None, a tensor or IndexedSlices, for one of ``variables``. None for all:
        the variables have their new values, the optimizer has nothing left to do.
        """
        ...

    def after(
        self, optimizer: Any, variables: Sequence[Any], state: Sequence[Any]
    ) -> None:
        """The optimizer has applied what ``before`` gave it."""
        ...

    def settle(self, what: str) -> None:
        """The weights are about to be looked at: make them those of all ranks.

        Called outside of steps, by all ranks at the same place; ``what`` names it.
        """
        ...


class OptimizerNames:
    """Of optimizers, on all ranks alike: the second of one name is ``adam (2)``."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._counts: Counter[str] = Counter()

    def of(self, optimizer: Any) -> str:
        if optimizer not in self._names:
            name = optimizer.name
            self._counts[name] += 1
            count = self._counts[name]
            self._names[optimizer] = name if count == 1 else f"{name} ({count})"
        return self._names[optimizer]
