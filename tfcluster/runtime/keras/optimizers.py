"""Where gradients are exchanged: on entry to ``Optimizer.apply``.

``fit`` and hand-written loops both pass through it, and everything that an optimizer
does to gradients (clipping, accumulation, averages) comes after it: so it does what it
would on one machine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfcluster.runtime.keras.gradients import exchange
from tfcluster.runtime.keras.layer_state import LayerState
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.sync import Synchroniser, related_variables
from tfcluster.runtime.keras.wrapping import wrap


class Optimizers:
    """The hook on ``apply``."""

    def __init__(
        self,
        session: Session,
        synchroniser: Synchroniser,
        layer_state: LayerState,
    ) -> None:
        self._session = session
        self._synchroniser = synchroniser
        self._layer_state = layer_state
        self._related: dict[int, tuple[weakref.ref[Any], list[int], list[Any]]] = {}

    def install(self) -> None:
        wrap(keras.optimizers.Optimizer, "apply", self._apply)
        # It checks its gradients before it calls the other: ranks would disagree.
        wrap(keras.optimizers.LossScaleOptimizer, "apply", self._apply)

    def _apply(
        self,
        original: Callable[..., Any],
        optimizer: Any,
        grads: Sequence[Any],
        trainable_variables: Sequence[Any] | None = None,
    ) -> Any:
        grads = list(grads)
        if not grads or self._session.within("apply"):
            return original(optimizer, grads, trainable_variables)
        with self._session.once("apply"):
            variables = _build(optimizer, trainable_variables)
            if variables is not None:
                grads = self._exchange(optimizer, grads, variables)
            return original(optimizer, grads, trainable_variables)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _exchange(
        self, optimizer: Any, grads: list[Any], variables: list[Any]
    ) -> list[Any]:
        self._session.hooked.add(id(optimizer))
        related = self._related_to(optimizer, variables)
        self._synchroniser.ensure([*variables, *optimizer.variables, *related])
        state = self._layer_state.among(related)
        return exchange(self._session, optimizer.name, grads, variables, state)

    def _related_to(self, optimizer: Any, variables: list[Any]) -> list[Any]:
        """Other variables of the layers that are trained; looked up once."""
        ids = [id(variable) for variable in variables]
        known = self._related.get(id(optimizer))
        if known and known[0]() is optimizer and known[1] == ids:
            return known[2]
        related = related_variables(variables)
        self._related[id(optimizer)] = weakref.ref(optimizer), ids, related
        return related


def _build(
    optimizer: Any, trainable_variables: Sequence[Any] | None
) -> list[Any] | None:
    """The variables that gradients are for; the optimizer then has its own.

    None where the original has to say what is missing.
    """
    if trainable_variables is None:
        return list(optimizer._trainable_variables) if optimizer.built else None
    variables = list(trainable_variables)
    if not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
        optimizer.built = True
    return variables
