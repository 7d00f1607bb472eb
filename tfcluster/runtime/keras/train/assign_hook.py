"""Intercept assignments to Keras variables.

Metrics ignore rows that do not count on this rank, and the variables that layers update
from their data are recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfcluster.runtime.keras import patches
from tfcluster.runtime.keras.data.dataset_iteration import DatasetIteration
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.train.metric_state import MetricState
from tfcluster.runtime.keras.train.moving_statistics import MovingStatistics
from tfcluster.runtime.keras.types import Variable


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
        patches.TABLE.install({patches.VARIABLE_ASSIGN: self._assign})

    def _assign(
        self, original: Callable[..., Any], variable: Variable, value: Any
    ) -> Any:
        if not self._session.within("update_state"):
            if not self._session.within("apply"):
                self._layer_state.assigned(variable, value)
            return original(variable, value)
        counts = self._counts()
        current = tf.convert_to_tensor(variable.value)
        value = tf.cast(tf.convert_to_tensor(value), current.dtype)
        value = self._metric_state.weighed(variable, value, current)
        if counts is not True:
            value = tf.where(counts, value, current)
        return original(variable, value)

    def _counts(self) -> Any:
        """Whether metrics count this rank's rows: True, False or a boolean tensor."""
        if (share := self._session.share) is not None:
            return share.counts
        return True if self._session.inside_keras else self._loops.counts.read()
