"""The ``tf.distribute.Server`` of a task, and the device filters of its sessions.

The server uses the task's port in TF_CONFIG. The agent has bound that port, too;
TF_GRPC_REUSE_PORT makes TensorFlow accept that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfcluster.protocol import task_events
from tfcluster.runtime.context import Context
from tfcluster.runtime.errors import ContextError
from tfcluster.runtime.telemetry.agent_channel import reporter
from tfcluster.runtime.tf1_types import Server


def start(context: Context) -> Server:
    """Start a ``tf.distribute.Server`` for ``context``'s task.

    Raises ContextError if TF_CONFIG has no address for it.
    """
    cluster = {job: list(addresses) for job, addresses in context.cluster.items()}
    if context.task_index >= len(cluster.get(context.task_type, ())):
        raise ContextError(f"TF_CONFIG has no address for {context.task}")
    import tensorflow as tf

    server: Server = tf.distribute.Server(
        cluster,
        job_name=context.task_type,
        task_index=context.task_index,
        protocol="grpc",
        config=tf.compat.v1.ConfigProto(device_filters=filters_of(context)),
    )
    report(cluster[context.task_type][context.task_index])
    return server


def report(address: str) -> None:
    """Tell the agent that a server listens at our address ``host:port``."""
    reporter().send(task_events.ServerMessage(int(address.rpartition(":")[2])))


def filters_of(context: Context) -> tuple[str, ...]:
    """The launcher's device filters, or ``device_filters`` without a launcher."""
    if context.run is not None:
        return context.device_filters
    return device_filters(context.task_type, context.task_index, context.cluster)


def device_filters(
    task_type: str, index: int, cluster: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """The default device filters of a task's sessions; if empty, they see all devices.

    In a cluster with parameter servers, a worker sees only itself and the ps tasks: it
    needs no other worker, and so a missing worker cannot delay it. A ps sees all
    devices, and so does every task of a cluster without ps tasks.
    """
    if task_type == "ps" or not cluster.get("ps"):
        return ()
    return ("/job:ps", f"/job:{task_type}/task:{index}")
