"""TensorFlow's own server for a task, and the devices that its sessions see.

The server's port is the one that TF_CONFIG has for the task. The agent holds that port,
which TF_GRPC_REUSE_PORT makes TensorFlow accept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfcluster.runtime.context import Context
from tfcluster.runtime.errors import ContextError


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

    A worker of a cluster with parameter servers needs no other worker, and one that
    is missing cannot delay it if it does not see that worker. Parameter servers see all
    devices. So do the tasks of a cluster without them: their workers need each other.
    """
    if task_type == "ps" or not cluster.get("ps"):
        return ()
    return ("/job:ps", f"/job:{task_type}/task:{index}")
