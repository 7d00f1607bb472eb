"""What building a graph gives: ops, and the hook of a session that trains with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

tf1 = tf.compat.v1


@dataclass(frozen=True, kw_only=True)
class Training:
    """``train_op`` is one step, up to and with the last barrier."""

    train_op: Any
    loss: Any
    """The mean over this worker's towers."""
    global_step: Any
    barriers: int
    """How many times the workers wait for each other in a step."""
    hook: Any
    """For ``MonitoredTrainingSession(hooks=[...])``: see ``Together``."""
    sync_initial: Any = None
    """Sets this worker's copies to what the parameter servers hold."""
    sync_model_variables: Any = None
    """The chief's variables that are not trained go to the parameter servers; None on
    the others, and where there are none."""
    bytes_held: tuple[int, ...] = ()
    """Of the variables that were placed, by ps task, without the optimizer's own."""
    masters: tuple[Any, ...] = field(default=(), repr=False)
    """The variables on the parameter servers."""


class Together(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]  # untyped
    """Workers begin with the same weights, and end in the same step.

    When one of them ends, the others do so after their next step, in which they still
    find its last tokens: nobody waits for it.
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
        # By a call of its own: in the same one, it could be read before it is written.
        if run_context.session.run(self._left):
            run_context.request_stop()

    def end(self, session: Any) -> None:
        session.run(self._farewell)


def remembered(left: Any, device: str) -> tuple[Any, Any]:
    """A local variable for whether any worker has left, and the op that sets it."""
    with tf1.device(device):
        variable = tf1.get_variable(
            "tfcluster/left",
            initializer=False,
            trainable=False,
            use_resource=True,
            collections=[tf1.GraphKeys.LOCAL_VARIABLES],
        )
        return variable.read_value(), variable.assign(left).op
