"""Lets training with ``SyncReplicasOptimizer`` end soon after the chief ends.

TensorFlow's own hook leaves the workers without a token for their next step. On the
chief, it leaves a thread that waits for their gradients.
"""

from __future__ import annotations

import tensorflow as tf

from tfcluster.runtime import tf_internals
from tfcluster.runtime.tensor_types import Operation
from tfcluster.runtime.tf1_types import (
    Coordinator,
    Session,
    SessionRunContext,
    SessionRunHook,
)

STOP_GRACE_S = 2
"""Seconds to wait for the chief session's threads, which do not end; default: 120."""


class SyncReplicasHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]  # untyped
    """The optimizer's own hook; also ends workers that wait for a token in vain.

    When the chief ends, it closes the token queue. Taking from it then raises
    OutOfRangeError, which ends a managed session.
    """

    def __init__(
        self,
        optimizer: tf_internals.SyncReplicasOptimizer,
        hook: SessionRunHook,
        *,
        is_chief: bool,
    ) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._hook = hook
        self._is_chief = is_chief
        self._close: Operation | None = None

    def begin(self) -> None:
        self._hook.begin()
        if self._is_chief:
            self._close = tf_internals.token_queue(self._optimizer).close()

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self._hook.after_create_session(session, coord)

    def before_run(self, run_context: SessionRunContext) -> object:
        return self._hook.before_run(run_context)

    def after_run(self, run_context: SessionRunContext, run_values: object) -> None:
        self._hook.after_run(run_context, run_values)

    def end(self, session: Session) -> None:
        self._hook.end(session)
        if self._close is not None:
            session.run(self._close)
