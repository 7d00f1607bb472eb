"""The hook on ``Optimizer.apply``, where gradients become new weights.

``fit`` and custom loops both call it. Everything that an optimizer does to gradients
(clipping, accumulation, averages) comes after the hook, and therefore works as on one
machine. The strategy decides what happens to the gradients; see ``gradient_update``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfcluster.runtime.contract import Around
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.program_lines import user_line
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.train.gradient_update import GradientUpdate
from tfcluster.runtime.keras.train.initial_broadcast import (
    InitialBroadcast,
    related_variables,
)
from tfcluster.runtime.keras.train.moving_statistics import MovingStatistics
from tfcluster.runtime.keras.types import Optimizer, Variable


class OptimizerHook:
    """The hook on ``apply``."""

    def __init__(
        self,
        session: Session,
        synchroniser: InitialBroadcast,
        layer_state: MovingStatistics,
        update: GradientUpdate,
    ) -> None:
        self._session = session
        self._synchroniser = synchroniser
        self._layer_state = layer_state
        self._update = update
        self._related: dict[int, tuple[weakref.ref[Any], list[int], list[Any]]] = {}
        """By the first trained variable."""

    def install(self, loss_scaled: Around | None = None) -> None:
        """Install the hook. ``loss_scaled`` wraps ``LossScaleOptimizer.apply``."""
        patches.TABLE.install(
            {
                patches.OPTIMIZER_APPLY: self._apply,
                # It checks its gradients before it calls the inner one; ranks might
                # disagree.
                patches.LOSS_SCALE_APPLY: loss_scaled or self._apply,
            }
        )

    def _apply(
        self,
        original: Callable[..., Any],
        optimizer: Optimizer,
        grads: Sequence[Any],
        trainable_variables: Sequence[Any] | None = None,
    ) -> Any:
        grads = list(grads)
        if not grads or self._session.within("apply"):
            return original(optimizer, grads, trainable_variables)
        with self._session.once("apply"):
            variables = built(optimizer, trainable_variables)
            if variables is None:
                return original(optimizer, grads, trainable_variables)
            state = self._state(optimizer, variables)
            own = self._before(optimizer, grads, variables, state)
            if own is None:
                return optimizer.iterations
            result = original(optimizer, own, trainable_variables)
            self._after(optimizer, variables, state)
            return result

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _state(self, optimizer: Optimizer, variables: list[Variable]) -> list[Any]:
        """The state that layers update, made equal on all ranks like all variables."""
        if not self._session.inside_keras and not self._session.loop.divided:
            self._session.loop.applied_at = user_line()
        self._session.hook(variables)
        state: list[Any] = self.state_of(variables)
        self._synchroniser.ensure([*variables, *optimizer.variables])
        return state

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def state_of(self, variables: list[Variable]) -> list[Any]:
        """The state that layers of ``variables`` update, made equal on all ranks."""
        related = self._related_to(variables)
        self._layer_state.merge(related)
        self._synchroniser.ensure([*variables, *related])
        return self._layer_state.among(related)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _before(self, *found: Any) -> list[Any] | None:
        return self._update.before(*found)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _after(self, *found: Any) -> None:
        self._update.after(*found)

    def _related_to(self, variables: list[Variable]) -> list[Any]:
        """All variables of the layers that contain ``variables``; looked up once."""
        first = variables[0]
        ids = [id(variable) for variable in variables]
        known = self._related.get(id(first))
        if known and known[0]() is first and known[1] == ids:
            return known[2]
        related = related_variables(variables)
        self._related[id(first)] = weakref.ref(first), ids, related
        return related


def built(
    optimizer: Optimizer, trainable_variables: Sequence[Any] | None
) -> list[Any] | None:
    """The variables of the gradients; builds the optimizer if necessary.

    None if the original has to report what is missing.
    """
    if trainable_variables is None:
        return internals.trained_variables(optimizer) if optimizer.built else None
    variables = list(trainable_variables)
    if not optimizer.built:
        # Not later, even if a step is only being traced: its values will be read.
        with tf.init_scope(), keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
        optimizer.built = True
    return variables
