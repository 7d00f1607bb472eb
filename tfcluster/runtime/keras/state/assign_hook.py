"""Intercepts assignments to Keras variables.

Metrics ignore rows that do not count on this rank. The variables that layers update
from their data are recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfcluster.runtime.keras import patches
from tfcluster.runtime.keras.data.dataset_iteration import DatasetIteration
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.state.metric_state import MetricState
from tfcluster.runtime.keras.state.moving_statistics import MovingStatistics
from tfcluster.runtime.keras.types import Variable
from tfcluster.runtime.tensor_types import Tensor, TensorLike


class AssignHook:
    """The hook on ``Variable.assign``."""

    def __init__(
        self,
        session: Session,
        layer_state: MovingStatistics,
        metric_state: MetricState,
        loops: DatasetIteration,
    ) -> None:
        self._session = session
        self._layer_state = layer_state
        self._metric_state = metric_state
        self._loops = loops

    def install(self) -> None:
        """Install the hook in Keras, once per process."""
        patches.TABLE.install({patches.VARIABLE_ASSIGN: self._assign})

    def _assign(
        self,
        original: Callable[[Variable, TensorLike], Any],
        variable: Variable,
        value: TensorLike,
    ) -> Any:
        if not self._session.within("update_state"):
            if not self._session.within("apply"):
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
