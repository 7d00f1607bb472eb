"""A training step that a rank computes shard by shard, from its batch to its logs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfcluster.runtime.keras.checks.divergence_check import DivergenceCheck
from tfcluster.runtime.keras.metrics.metrics import Metrics
from tfcluster.runtime.keras.metrics.step_logs import Value
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.state.shard_state import ShardState
from tfcluster.runtime.keras.train.optimizer_hook import OptimizerHook
from tfcluster.runtime.keras.train.shard_exchange import exchange_shards
from tfcluster.runtime.keras.train.shard_steps import Applied, ShardPart, ShardSteps
from tfcluster.runtime.keras.types import Model, Optimizer
from tfcluster.runtime.tensor_types import Gradient


class ShardUpdate:
    """Averages the gradients of all shards and has the optimizer apply them."""

    def __init__(
        self,
        session: Session,
        steps: ShardSteps,
        state: ShardState,
        divergence_check: DivergenceCheck,
        optimizers: OptimizerHook,
        metrics: Metrics,
    ) -> None:
        self.steps = steps
        self._session = session
        self._state = state
        self._divergence_check = divergence_check
        self._optimizers = optimizers
        self._metrics = metrics

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def finish(
        self,
        model: Model,
        parts: Sequence[ShardPart],
        logs: Sequence[Value],
        *,
        plain: bool,
    ) -> Value:
        """End the step of ``parts``, which returned ``logs``; returns the step's logs.

        All ranks must call it at the end of the same step. Raises what
        ``exchange_shards`` raises.
        """
        share = self.steps.share(parts)
        applied = self.steps.finish()
        with self._session.stepping(share, plain=plain):
            if applied is not None:
                self._optimizers.apply_shards(applied, self._exchanged)
            else:
                self._state.finish_without_gradients()
        rows = [part.share.rows for part in parts]
        return self._metrics.of_shards(model, logs, rows)

    def _exchanged(self, applied: Applied) -> list[Gradient]:
        session, optimizer = self._session, applied.optimizer
        name = session.optimizer_names.of(optimizer)
        averaged, _ = self._state.averages()
        first = applied.gradients[0].gradients
        pairs = zip(applied.variables, first, strict=True)
        trained = [variable for variable, gradient in pairs if gradient is not None]
        watch = self._divergence_check.watch(_owner(name, optimizer), name, trained)
        means, state = exchange_shards(
            session, name, applied.gradients, applied.variables, averaged, watch
        )
        self._state.finish(state)
        return means


def _owner(
    name: str, optimizer: Optimizer
) -> Callable[[], tuple[str, Optimizer] | None]:
    reference = weakref.ref(optimizer)

    def owner() -> tuple[str, Optimizer] | None:
        found = reference()
        return None if found is None else (name, found)

    return owner
