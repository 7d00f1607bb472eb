"""Synchronous training: every rank applies the average of all ranks' gradients."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from tfcluster.runtime.keras.checks.divergence_check import DivergenceCheck, Watch
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.train.gradient_allreduce import Target, exchange
from tfcluster.runtime.keras.train.tape_gradients import TapeGradients
from tfcluster.runtime.keras.types import Optimizer, Variable
from tfcluster.runtime.tensor_types import Gradient


class CollectiveUpdate:
    """The ``GradientUpdate`` that all-reduces gradients."""

    def __init__(
        self,
        session: Session,
        tape_gradients: TapeGradients,
        divergence_check: DivergenceCheck | None = None,
    ) -> None:
        self._session = session
        self._tape_gradients = tape_gradients
        self._divergence_check = divergence_check

    def before(
        self,
        optimizer: Optimizer,
        gradients: Sequence[Gradient],
        variables: Sequence[Variable],
        state: Sequence[Variable],
    ) -> list[Gradient] | None:
        """Average the gradients that no tape has averaged; return all averages.

        Raises CollectiveError if the program has changed its rank's gradient, and what
        ``exchange`` raises.
        """
        tapes = self._tape_gradients
        name = self._session.optimizer_names.of(optimizer)
        target = Target.of(name)
        watch = None
        if self._divergence_check is not None:
            ref = weakref.ref(optimizer)

            def owner() -> tuple[str, Optimizer] | None:
                found = ref()
                return None if found is None else (name, found)

            pairs = zip(variables, gradients, strict=True)
            trained = [variable for variable, gradient in pairs if gradient is not None]
            watch = self._divergence_check.watch(owner, name, trained)
        own = tapes.still_to_exchange(optimizer, gradients, variables)
        if all(own):
            return exchange(self._session, target, gradients, variables, state, watch)
        found = list(gradients)
        if tapes.drawn_since(gradients, variables):
            # Continue with the chief's random numbers on all ranks.
            chosen = [i for i, is_own in enumerate(own) if not is_own]
            self._replace(found, variables, chosen, target, chiefs_count=True)
        if any(own):
            chosen = [i for i, is_own in enumerate(own) if is_own]
            self._replace(found, variables, chosen, target, watch)
        return found

    def _replace(
        self,
        gradients: list[Gradient],
        variables: Sequence[Variable],
        places: Sequence[int],
        target: Target,
        watch: Watch | None = None,
        *,
        chiefs_count: bool = False,
    ) -> None:
        averaged = exchange(
            self._session,
            target,
            [gradients[i] for i in places],
            [variables[i] for i in places],
            [],
            watch,
            chiefs_count=chiefs_count,
        )
        for place, gradient in zip(places, averaged, strict=True):
            gradients[place] = gradient

    def after(
        self,
        optimizer: Optimizer,
        variables: Sequence[Variable],
        state: Sequence[Variable],
    ) -> None:
        """Do nothing."""

    def settle(self, what: str) -> None:
        """Do nothing: the weights are identical on all ranks after every step."""
