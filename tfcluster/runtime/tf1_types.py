"""The types of TensorFlow 1's objects, as far as the runtime uses them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    # This imports numpy, which a server must not do: see ``task.serve``.
    from tfcluster.runtime.tensor_types import (
        Gradient,
        Graph,
        Nest,
        Operation,
        Tensor,
        Variable,
    )


class V1Optimizer(Protocol):
    """A ``tf.compat.v1.train.Optimizer``."""

    def compute_gradients(
        self, *args: Any, **kwargs: Any
    ) -> list[tuple[Gradient, Variable]]: ...

    def apply_gradients(
        self,
        grads_and_vars: Any,
        global_step: Variable | None = None,
        name: str | None = None,
    ) -> Operation: ...

    def variables(self) -> list[Variable]:
        """Its slot variables and others, in the current graph."""


class ConfigProto(Protocol):
    """A ``tf.compat.v1.ConfigProto``."""

    allow_soft_placement: bool
    inter_op_parallelism_threads: int
    intra_op_parallelism_threads: int
    operation_timeout_in_ms: int
    use_per_session_threads: bool
    device_filters: Any
    """A list of strings, of which only the elements can be set."""

    gpu_options: Any

    def CopyFrom(self, other: ConfigProto) -> None: ...


class V1Session(Protocol):
    """A ``tf.compat.v1.Session``, including a monitored session."""

    graph: Graph

    def run(self, fetches: Nest, feed_dict: Mapping[Tensor, Any] | None = None) -> Any:
        """The values of ``fetches``, nested in the same way."""


class Coordinator(Protocol):
    """A ``tf.train.Coordinator`` of a session's threads."""


class SessionRunContext(Protocol):
    """The argument that TensorFlow gives a ``SessionRunHook`` around each ``run``."""

    session: V1Session

    def request_stop(self) -> None: ...


class SessionRunHook(Protocol):
    """A ``tf.compat.v1.train.SessionRunHook``."""

    def begin(self) -> None: ...

    def after_create_session(self, session: V1Session, coord: Coordinator) -> None: ...

    def before_run(self, run_context: SessionRunContext) -> Any: ...

    def after_run(self, run_context: SessionRunContext, run_values: Any) -> None: ...

    def end(self, session: V1Session) -> None: ...


class Server(Protocol):
    """A running ``tf.distribute.Server``."""

    target: str
    """The target of sessions on this server: ``grpc://HOST:PORT``."""
