"""The built-in server of a ps or data task, or of one that another task drives.

It serves until it is stopped. A TensorFlow server's port is the one that TF_CONFIG has
for the task; the agent holds it, which TF_GRPC_REUSE_PORT makes TensorFlow accept.
Knows nothing of what its clients do.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from tfcluster.runtime import data_service
from tfcluster.runtime.context import Context
from tfcluster.runtime.errors import ContextError
from tfcluster.runtime.events import reporter

if TYPE_CHECKING:
    from tfcluster.runtime.parameter_server.serving import Serving

_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def serve(context: Context) -> NoReturn:
    """Be the server of ``context``'s task until SIGTERM, SIGINT or SIGHUP; exit 0.

    Raises ContextError where the environment has no address for it.
    """
    # Blocked before TensorFlow has threads, which inherit that: so a signal waits for
    # us, however deep in C++ the others are.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)
    reporter().listen()
    reporter().phase("importing tensorflow")
    if context.task_type == "data":
        producing = data_service.start(context)
        _until_stopped(producing, None, lambda: data_service.clear(context))
    # TensorFlow's server comes last: who finds it listening finds ours, too.
    parameters = _parameters(context)
    _until_stopped(start(context), parameters)


def _parameters(context: Context) -> Serving | None:
    """The service that keeps variables, where this task has to be one."""
    if context.task_type != "ps" or not context.parameter_servers:
        return None
    # Not at the top: it brings numpy, which other servers do without.
    from tfcluster.runtime.parameter_server import serving

    return serving.start(context, reporter())


def _until_stopped(
    server: Any,
    parameters: Serving | None,
    clear: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Keep the servers alive until we are told to end."""
    reporter().phase("serving")
    signal.sigwait(_STOP)
    if parameters is not None:
        parameters.report()
    clear()
    # TensorFlow cannot shut a server down cleanly: no destructors, then.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def start(context: Context) -> Any:
    """A running ``tf.distribute.Server`` for ``context``'s task.

    Raises ContextError where TF_CONFIG has no address for it.
    """
    cluster = {job: list(found) for job, found in context.cluster.items()}
    if context.task_index >= len(cluster.get(context.task_type, ())):
        raise ContextError(f"TF_CONFIG has no address for {context.task}")
    import tensorflow as tf

    return tf.distribute.Server(
        cluster,
        job_name=context.task_type,
        task_index=context.task_index,
        protocol="grpc",
        config=tf.compat.v1.ConfigProto(device_filters=filters_of(context)),
    )


def filters_of(context: Context) -> tuple[str, ...]:
    """What the launcher says, else the default, of ``device_filters``."""
    if context.run is not None:
        return context.device_filters
    return device_filters(context.task_type, context.task_index, context.cluster)


def device_filters(
    task_type: str, index: int, cluster: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """The devices that a task's sessions see, by default; empty: all of them.

    Beside parameter servers a worker needs no other worker, and whoever does not see
    the others cannot be held up by one that is missing. Parameter servers see all, as
    do tasks of a cluster that has none, whose workers need each other.
    """
    if task_type == "ps" or not cluster.get("ps"):
        return ()
    return ("/job:ps", f"/job:{task_type}/task:{index}")
