"""Applies the gradients of a step that ranks compute shard by shard."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from tfcluster.runtime.keras.checks.divergence_check import DivergenceCheck
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.train.gradient_allreduce import Target
from tfcluster.runtime.keras.train.shard_steps import Given, ShardSteps
from tfcluster.runtime.keras.train.tape_gradients import TapeGradients
from tfcluster.runtime.keras.types import Optimizer, Variable
from tfcluster.runtime.tensor_types import Gradient, IndexedSlices, Tensor
from tfcluster.runtime.tensors import is_sparse, name_of


class ShardUpdate:
    """Averages the gradients that no tape has averaged, and has them applied once."""

    def __init__(
        self,
        session: Session,
        steps: ShardSteps,
        tape_gradients: TapeGradients,
        divergence_check: DivergenceCheck,
    ) -> None:
        self.steps = steps
        self._session = session
        self._tape_gradients = tape_gradients
        self._divergence_check = divergence_check

    def apply_once(
        self,
        optimizer: Optimizer,
        given: Given,
        act: Callable[[list[Given]], Variable],
    ) -> Variable:
        """Call ``act`` once with what the steps of all shards give to ``optimizer``.

        Each shard calls this. Raises CollectiveError if a shard gives its own gradients
        within a conditional.
        """
        if self.steps.is_alone:
            return act([given])
        ids = [id(variable) for variable in given.variables]
        kind = ("applies gradients", id(optimizer), *ids)
        found: Variable = self.steps.together(kind, given, act)
        return found

    def gradients(self, optimizer: Optimizer, given: Sequence[Given]) -> list[Gradient]:
        """The gradients of the whole batch that ``optimizer`` is to apply.

        Raises CollectiveError if the program has made them depend on one shard, and
        what ``ShardSteps.combined`` raises.
        """
        found, variables = list(given[0].gradients), given[0].variables
        own = self._tape_gradients.still_to_exchange(optimizer, found, variables)
        name = self._session.optimizer_names.of(optimizer)
        for gradient, variable, is_own in zip(found, variables, own, strict=True):
            if gradient is None or is_own or self.steps.is_alone:
                continue
            if self.steps.depends(_tensors(gradient)):
                self._session.refuse(
                    f"{given[0].where}: the gradient of {name_of(variable)} that "
                    f"{name} applies is changed by a number that depends on the rows "
                    "of the batch, such as the loss. With runtime.shards, the step "
                    "knows that number of one shard only. Run the job without "
                    "runtime.shards"
                )
        chosen = [place for place, is_own in enumerate(own) if is_own]
        if not chosen:
            return found
        if self.steps.is_alone:
            self.steps.require_graph("applies gradients")
        each = [
            Given([one.gradients[i] for i in chosen], [variables[i] for i in chosen])
            for one in given
        ]
        trained = [variables[i] for i in chosen if found[i] is not None]
        watch = self._divergence_check.watch(_owner(name, optimizer), name, trained)
        means = self.steps.combined(Target.of(name), each, watch)
        for place, mean in zip(chosen, means, strict=True):
            found[place] = mean
        return found


def _tensors(gradient: Tensor | IndexedSlices) -> list[Tensor]:
    if is_sparse(gradient):
        return [gradient.values, gradient.indices]
    return [gradient]


def _owner(
    name: str, optimizer: Optimizer
) -> Callable[[], tuple[str, Optimizer] | None]:
    reference = weakref.ref(optimizer)

    def owner() -> tuple[str, Optimizer] | None:
        found = reference()
        return None if found is None else (name, found)

    return owner
