"""The result of building a graph: its ops, and a hook for the session that trains."""

from __future__ import annotations

from dataclasses import dataclass, field

import tensorflow as tf

from tfcluster.runtime.tensor_types import Operation, Tensor, Variable
from tfcluster.runtime.tf1_types import (
    Coordinator,
    Session,
    SessionRunContext,
    SessionRunHook,
)

tf1 = tf.compat.v1


@dataclass(frozen=True, kw_only=True)
class Training:
    """``train_op`` is one step, including its last barrier.

    ``loss`` is a scalar of the dtype that the program's ``loss`` returns, and
    ``global_step`` is an int64 scalar variable.
    """

    train_op: Operation
    loss: Tensor
    """The mean over this worker's towers."""
    global_step: Variable
    barriers: int
    """The number of barriers in a step."""
    hook: SessionRunHook
    """For ``MonitoredTrainingSession(hooks=[...])``: see ``TrainingHook``."""
    sync_initial: Operation | None = None
    """Sets this worker's copies to the values on the parameter servers."""
    sync_model_variables: Operation | None = None
    """Copies the chief's non-trainable variables to the parameter servers. None on
    other workers, and if there are no such variables."""
    bytes_held: tuple[int, ...] = ()
    """The bytes of the placed variables by ps task, without the optimizer's slots."""
    masters: tuple[Variable, ...] = field(default=(), repr=False)
    """The variables on the parameter servers."""


class TrainingHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]  # untyped
    """Makes workers start with the same weights and end in the same step.

    When a worker ends, the others end after their next step. The worker's last tokens
    let them finish that step, so no worker waits for it.
    """

    def __init__(
        self, *, left: Tensor, departure: Operation, initial: Operation | None = None
    ) -> None:
        super().__init__()
        self._left = left
        self._departure = departure
        self._initial = initial

    def after_create_session(self, session: Session, coord: Coordinator) -> None:
        if self._initial is not None:
            session.run(self._initial)

    def after_run(self, run_context: SessionRunContext, run_values: object) -> None:
        # In a separate call: in the same call it could be read before it is written.
        if run_context.session.run(self._left):
            run_context.request_stop()

    def end(self, session: Session) -> None:
        session.run(self._departure)


def departure_flag(left: Tensor, device: str) -> tuple[Tensor, Operation]:
    """The value of a local variable that records ``left``, and the op that sets it.

    ``left`` is a boolean scalar that says whether a worker has left.
    """
    with tf1.device(device):
        variable = tf1.get_variable(
            "tfcluster/left",
            initializer=False,
            trainable=False,
            use_resource=True,
            collections=[tf1.GraphKeys.LOCAL_VARIABLES],
        )
        return variable.read_value(), variable.assign(left).op
