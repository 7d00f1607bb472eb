"""The hook on ``Optimizer.apply``, where gradients become new weights.

``fit`` and custom loops both call it. Everything that an optimizer does to gradients
(clipping, accumulation, averages) comes after the hook, and therefore works as on one
machine. The strategy decides what happens to the gradients; see ``gradient_update``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import keras
import tensorflow as tf

from tfcluster.runtime.exchange.reduced_tensors import reduced
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.checks.own_exchanges import OwnExchanges
from tfcluster.runtime.keras.graph_order import refuse_xla
from tfcluster.runtime.keras.object_map import ObjectMap
from tfcluster.runtime.keras.program_lines import user_line
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.state.moving_statistics import MovingStatistics
from tfcluster.runtime.keras.tf_variables import made_at_once
from tfcluster.runtime.keras.train.gradient_update import GradientUpdate
from tfcluster.runtime.keras.train.initial_broadcast import (
    InitialBroadcast,
    related_variables,
)
from tfcluster.runtime.keras.types import Optimizer, Variable
from tfcluster.runtime.tensor_types import Gradient


class OptimizerHook:
    """The hook on ``apply``."""

    def __init__(
        self,
        session: Session,
        initial_broadcast: InitialBroadcast,
        layer_state: MovingStatistics,
        update: GradientUpdate,
        own_exchanges: OwnExchanges,
    ) -> None:
        self._session = session
        self._initial_broadcast = initial_broadcast
        self._layer_state = layer_state
        self._update = update
        self._own_exchanges = own_exchanges
        self._before_loss_scale: Callable[[list[Gradient]], list[Gradient]] = list
        self._related = ObjectMap[tuple[list[int], list[Variable]]]()
        """The related variables, by the first trained variable."""

    def install(
        self,
        before_loss_scale: Callable[[list[Gradient]], list[Gradient]] | None = None,
    ) -> None:
        """Install the hook.

        A ``LossScaleOptimizer`` checks its gradients before it calls the inner
        optimizer, and ranks might disagree. So its gradients are exchanged before, or
        changed by ``before_loss_scale`` and exchanged at the inner optimizer.
        """
        patches.TABLE.install({patches.OPTIMIZER_APPLY: self._apply})
        if before_loss_scale is None:
            patches.TABLE.install({patches.LOSS_SCALE_APPLY: self._apply})
        else:
            self._before_loss_scale = before_loss_scale
            patches.TABLE.install({patches.LOSS_SCALE_APPLY: self._apply_loss_scaled})

    def _apply(
        self,
        original: Callable[..., Variable],
        optimizer: Optimizer,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[Variable] | None = None,
    ) -> Variable:
        grads = list(grads)
        if self._exchanged_by_the_program(grads):
            return original(optimizer, grads, trainable_variables)
        if not grads or self._session.within("apply"):
            return original(optimizer, grads, trainable_variables)
        with self._session.once("apply"):
            variables = self._built(optimizer, trainable_variables)
            if variables is None:
                return original(optimizer, grads, trainable_variables)
            state = self._state(optimizer, variables)
            own = self._before(optimizer, grads, variables, state)
            if own is None:
                return optimizer.iterations
            result = original(optimizer, own, trainable_variables)
            self._after(optimizer, variables, state)
            return result

    def _apply_loss_scaled(
        self,
        original: Callable[..., Variable],
        optimizer: Optimizer,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[Variable] | None = None,
    ) -> Variable:
        grads = list(grads)
        if self._exchanged_by_the_program(grads):
            return original(optimizer, grads, trainable_variables)
        if grads and not self._session.within("apply"):
            self._built(optimizer, trainable_variables)
            grads = self._before_loss_scale(grads)
        return original(optimizer, grads, trainable_variables)

    def _exchanged_by_the_program(self, grads: list[Gradient]) -> bool:
        """Whether these gradients need no exchange; refuse XLA if they need one."""
        exchanged: bool = reduced.applied(grads)
        self._own_exchanges.apply_begins(exchanged=exchanged)
        if not exchanged:
            refuse_xla()
        return exchanged

    def _built(
        self, optimizer: Optimizer, trainable_variables: Sequence[Variable] | None
    ) -> list[Variable] | None:
        """The variables of the gradients; builds the optimizer if necessary.

        Returns None if the original method has to report what is missing.
        """
        if trainable_variables is None:
            return internals.trained_variables(optimizer) if optimizer.built else None
        variables = list(trainable_variables)
        # Code that asks whether an optimizer is built must be traced as often as in one
        # process. The program's own code may ask, and loss scaling does.
        once = self._session.plain_step
        once = once and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        build(optimizer, variables, traces_once=once)
        return variables

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _state(self, optimizer: Optimizer, variables: list[Variable]) -> list[Variable]:
        """The state that layers update, made equal on all ranks like all variables."""
        if not self._session.inside_keras and not self._session.loop.is_dividing:
            self._session.loop.applied_at = user_line()
        self._session.hook(variables)
        state: list[Variable] = self.state_of(variables)
        self._initial_broadcast.ensure([*variables, *optimizer.variables])
        return state

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def state_of(self, variables: list[Variable]) -> list[Variable]:
        """The state that layers of ``variables`` update, made equal on all ranks.

        All ranks must call this at the same point. Raises CollectiveMismatchError on
        all ranks if the variables' paths, shapes or dtypes differ, and what
        ``MovingStatistics.merge`` raises.
        """
        related = self._related_to(variables)
        self._layer_state.merge(related)
        self._initial_broadcast.ensure([*variables, *related])
        return self._layer_state.among(related)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _before(
        self,
        optimizer: Optimizer,
        gradients: list[Gradient],
        variables: list[Variable],
        state: list[Variable],
    ) -> list[Gradient] | None:
        return self._update.before(optimizer, gradients, variables, state)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _after(
        self,
        optimizer: Optimizer,
        variables: list[Variable],
        state: list[Variable],
    ) -> None:
        self._update.after(optimizer, variables, state)

    def _related_to(self, variables: list[Variable]) -> list[Variable]:
        """All variables of the layers that contain ``variables``; looked up once."""
        first = variables[0]
        ids = [id(variable) for variable in variables]
        known = self._related.get(first)
        if known is not None and known[0] == ids:
            return known[1]
        related = related_variables(variables)
        self._related[first] = ids, related
        return related


def build(
    optimizer: Optimizer, variables: Sequence[Variable], *, traces_once: bool
) -> None:
    """Build the optimizer for ``variables``, unless it is already built.

    Its variables exist at once, even if a step, or a branch of it, is being traced.
    With ``traces_once``, a function being traced need not be traced a second time.
    """
    if optimizer.built:
        return
    scope = made_at_once() if traces_once else nullcontext()
    with scope, tf.init_scope(), keras.name_scope(optimizer.name, caller=optimizer):
        optimizer.build(list(variables))
    optimizer.built = True
