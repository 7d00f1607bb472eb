"""What a strategy makes of a rank's gradients."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from tfcluster.runtime.keras.drift_check import DriftCheck
from tfcluster.runtime.keras.gradients import exchange
from tfcluster.runtime.keras.session import Session


class Update(Protocol):
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


class Names:
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


class CollectiveUpdate:
    """Every rank applies the mean over all ranks."""

    def __init__(self, session: Session, drift: DriftCheck) -> None:
        self._session = session
        self._drift = drift
        self._names = Names()

    def before(
        self,
        optimizer: Any,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        state: Sequence[Any],
    ) -> list[Any] | None:
        name = self._names.of(optimizer)
        watch = self._drift.watch(name, optimizer, variables, gradients)
        return exchange(self._session, name, gradients, variables, state, watch)

    def after(
        self, optimizer: Any, variables: Sequence[Any], state: Sequence[Any]
    ) -> None:
        """Nothing is left to be done."""

    def settle(self, what: str) -> None:
        """They are so after every step."""
