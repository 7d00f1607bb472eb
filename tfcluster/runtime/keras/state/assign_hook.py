"""Intercepts assignments to Keras variables.

Metrics ignore rows that do not count on this rank. The variables that layers update
from their data are recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import tensorflow as tf

from tfcluster.runtime import tf_patches
from tfcluster.runtime.keras import patches
from tfcluster.runtime.keras.data.dataset_iteration import DatasetIteration
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.state.metric_state import MetricState
from tfcluster.runtime.keras.state.moving_statistics import MovingStatistics
from tfcluster.runtime.keras.state.shard_state import ShardState
from tfcluster.runtime.keras.tf_variables import is_ours
from tfcluster.runtime.keras.types import Variable
from tfcluster.runtime.tensor_types import Tensor, TensorLike
from tfcluster.runtime.tensor_types import Variable as TfVariable

T = TypeVar("T")

_OF_KERAS = "an assignment by Keras"
"""For ``Session.within``: Keras sets the ``tf.Variable`` of its variable."""


class ShardSteps(Protocol):
    """Runs the steps of a rank's shards: see ``train.shard_steps``."""

    def set_once(
        self, variable: Variable | TfVariable, value: Any, assign: Callable[[Any], T]
    ) -> T:
        """Call ``assign(value)`` once for all shards."""
        ...


class AssignHook:
    """The hook on ``Variable.assign``."""

    def __init__(
        self,
        session: Session,
        layer_state: MovingStatistics,
        metric_state: MetricState,
        loops: DatasetIteration,
        shard_state: ShardState,
        shard_steps: ShardSteps | None = None,
    ) -> None:
        self._session = session
        self._layer_state = layer_state
        self._metric_state = metric_state
        self._loops = loops
        self._shard_state = shard_state
        self._shard_steps = shard_steps

    def install(self) -> None:
        """Install the hook in Keras, once per process."""
        patches.TABLE.install({patches.VARIABLE_ASSIGN: self._assign})
        if self._shard_steps is not None:
            tf_patches.TABLE.install(
                dict.fromkeys(tf_patches.ASSIGNMENTS, self._assign_raw)
            )

    def _assign(
        self,
        original: Callable[[Variable, TensorLike], Any],
        variable: Variable,
        value: TensorLike,
    ) -> Any:
        if self._session.current_shard is not None:
            if not self._shard_state.is_of_library(variable):
                return self._set_once(variable, value, partial(original, variable))
            with self._session.once(_OF_KERAS):
                return self._assign_counted(original, variable, value)
        return self._assign_counted(original, variable, value)

    def _set_once(
        self, variable: Variable | TfVariable, value: Any, assign: Callable[[Any], Any]
    ) -> Any:
        assert self._shard_steps is not None

        def act(value: Any) -> Any:
            with self._session.once(_OF_KERAS):
                return assign(value)

        return self._shard_steps.set_once(variable, value, act)

    def _assign_raw(
        self,
        original: Callable[..., Any],
        variable: TfVariable,
        value: TensorLike,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Set a ``tf.Variable`` of the program, or add to it, once for all shards."""
        session = self._session
        if (
            session.current_shard is None
            or session.within(_OF_KERAS)
            or is_ours(variable.handle)
        ):
            return original(variable, value, *args, **kwargs)

        def assign(value: Any) -> Any:
            return original(variable, value, *args, **kwargs)

        return self._set_once(variable, value, assign)

    def _assign_counted(
        self,
        original: Callable[[Variable, TensorLike], Any],
        variable: Variable,
        value: TensorLike,
    ) -> Any:
        if not self._session.within("update_state"):
            if self._session.current_shard is None and not self._session.within(
                "apply"
            ):
                self._layer_state.assigned(variable, value)
            return original(variable, value)
        counts = self._counts()
        current = tf.convert_to_tensor(variable.value)
        new: Tensor = tf.cast(tf.convert_to_tensor(value), current.dtype)
        new = self._metric_state.weighed(variable, new, current)
        if counts is not True:
            new = tf.where(counts, new, current)
        return original(variable, new)

    def _counts(self) -> bool | Tensor:
        """Whether metrics count this rank's rows: a bool or a scalar boolean tensor."""
        if self._metric_state.trying:
            return True
        if self._metric_state.sees_all_rows:
            return self._session.chief
        if (share := self._session.share) is not None:
            counts: bool | Tensor = share.counts
            return counts
        return True if self._session.inside_keras else self._loops.seen.read().counts
