"""The result of building a graph: its ops, and a hook for the session that trains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

tf1 = tf.compat.v1


@dataclass(frozen=True, kw_only=True)
class Training:
    """``train_op`` is one step, including its last barrier."""

    train_op: Any
    loss: Any
    """The mean over this worker's towers."""
    global_step: Any
    barriers: int
    """The number of barriers in a step."""
    hook: Any
    """For ``MonitoredTrainingSession(hooks=[...])``: see ``Together``."""
    sync_initial: Any = None
    """Sets this worker's copies to the values on the parameter servers."""
    sync_model_variables: Any = None
    """Copies the chief's non-trainable variables to the parameter servers. None on
    other workers, and if there are none."""
    bytes_held: tuple[int, ...] = ()
    """Bytes of the placed variables by ps task, without the optimizer's slots."""
    masters: tuple[Any, ...] = field(default=(), repr=False)
    """The variables on the parameter servers."""


class Together(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]  # untyped
    """Workers start with the same weights and end in the same step.

    When one of them ends, the others end after their next step. Its last tokens let
    them through that step, so no worker waits for it.
    """

    def __init__(self, *, left: Any, farewell: Any, initial: Any = None) -> None:
        super().__init__()
        self._left = left
        self._farewell = farewell
        self._initial = initial

    def after_create_session(self, session: Any, coord: Any) -> None:
        if self._initial is not None:
            session.run(self._initial)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        # In a separate call: within the same one it could be read before it is written.
        if run_context.session.run(self._left):
            run_context.request_stop()

    def end(self, session: Any) -> None:
        session.run(self._farewell)


def remembered(left: Any, device: str) -> tuple[Any, Any]:
    """A local variable that records whether a worker left, and the op to set it."""
    with tf1.device(device):
        variable = tf1.get_variable(
            "tfcluster/left",
            initializer=False,
            trainable=False,
            use_resource=True,
            collections=[tf1.GraphKeys.LOCAL_VARIABLES],
        )
        return variable.read_value(), variable.assign(left).op
