"""The protocol of a strategy: what it does with a rank's gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

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
        state: Sequence[Variable],
    ) -> list[Gradient] | None:
        """Return what this rank's optimizer applies instead of ``gradients``.

        The list has one entry per variable: a tensor of its shape and dtype,
        IndexedSlices, or None. Returns None if the variables already have their new
        values and the optimizer must not run. Raises what the strategy's exchange
        raises; in a graph, when the op runs.
        """
        ...

    def after(
        self,
        optimizer: Optimizer,
        variables: Sequence[Variable],
        state: Sequence[Variable],
    ) -> None:
        """Called after the optimizer has applied the result of ``before``."""
        ...

    def settle(self, what: str) -> None:
        """Make the weights equal on all ranks before they are saved or evaluated.

        Called outside of steps by all ranks at the same place, which ``what`` names.
        Raises what ``Group.exchange`` raises.
        """
        ...
