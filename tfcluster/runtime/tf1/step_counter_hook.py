"""Reports the steps of a TensorFlow 1 session to the agent."""

from __future__ import annotations

import time

import tensorflow as tf

from tfcluster.runtime.telemetry.agent_channel import Reporter
from tfcluster.runtime.tf1_types import Session, SessionRunContext

_WINDOW_S = 1.0


class StepCounterHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]  # untyped
    """Counts each ``run`` as a step, since the session's purpose is to train."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__()
        self._reporter = reporter
        self._steps = 0
        self._window = (time.monotonic(), 0)
        self._rate = 0.0

    def after_run(self, run_context: SessionRunContext, run_values: object) -> None:
        self._steps += 1
        now = time.monotonic()
        began, steps = self._window
        if now - began >= _WINDOW_S or self._steps == 1:
            self._rate = (self._steps - steps) / max(now - began, 1e-9)
            self._window = (now, self._steps)
        self._reporter.step(self._steps, self._rate, 0.0)

    def end(self, session: Session) -> None:
        self._reporter.flush()
