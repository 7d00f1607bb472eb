"""Starts TensorFlow's server for collective ops at the first op, not earlier.

So a program can still configure threads, devices and memory growth after its imports.
The transport calls ``configure_collective_ops`` and ``enable_collective_ops`` of the
eager context like MultiWorkerMirroredStrategy, with DTensor's performance settings.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tensorflow as tf

from tfcluster.runtime import tf_internals, tf_patches, tf_server
from tfcluster.runtime.errors import CollectiveError

_CHUNK_BYTES = 1 << 16
"""recv_buf_max_chunk: the size of the fields in which a buffer is sent, instead of 4
KiB. A single field for a whole buffer (-1) is slower for large buffers."""
_CHANNELS = 4
"""Connections to each other task, so that large messages do not delay small ones."""


@dataclass(frozen=True, slots=True)
class ClusterTask:
    """This process in TF_CONFIG's cluster, and the tasks that train with it."""

    cluster: Mapping[str, tuple[str, ...]]
    """Addresses (``host:port``) by job: chief and worker."""
    job: str
    index: int

    @property
    def name(self) -> str:
        """TensorFlow's name of this task; see ``task_name``."""
        return task_name(self.job, self.index)

    @property
    def ranks(self) -> tuple[str, ...]:
        """TensorFlow's task name of every rank, in rank order."""
        return tuple(
            task_name(job, index)
            for job in ("chief", "worker")
            for index in range(len(self.cluster.get(job, ())))
        )

    @property
    def leader(self) -> str:
        """The collective leader; the same as MultiWorkerMirroredStrategy's."""
        return self.ranks[0]


def task_name(job: str, index: int) -> str:
    """TensorFlow's name of a task, without the device part."""
    return f"/job:{job}/replica:0/task:{index}"


def is_running() -> bool:
    """Whether TensorFlow has executed an op, so that it is too late for a server."""
    return bool(tf_internals.is_running(tf_internals.context()))


def arrange(task: ClusterTask, before: Callable[[], bool]) -> None:
    """At TensorFlow's first op, call ``before``; start the server if it returns True.

    Raises CollectiveError if TensorFlow has already executed an op, or lacks something
    that the server needs.
    """
    tf_internals.check()
    context = tf_internals.context()
    if tf_internals.is_running(context):
        raise CollectiveError(
            "TensorFlow is already in use: transport 'tensorflow' must be set up "
            "before any TensorFlow op. Call tfcluster.runtime.init() right after the "
            "imports, before any tensor, variable, dataset or list of logical devices"
        )
    start = context.ensure_initialized
    lock = threading.RLock()
    pid = os.getpid()

    def start_with_server() -> None:
        with lock:
            # A forked child is not a rank.
            is_first = os.getpid() == pid and not tf_internals.is_running(context)
            has_server = is_first and before()
            if has_server:
                _configure(context, task)
            tf_patches.TABLE.restore(tf_patches.ONE_CONTEXT_INITIALIZED, context)
            start()
            if has_server:
                tf_server.report(task.cluster[task.job][task.index])

    tf_patches.TABLE.replace(
        tf_patches.ONE_CONTEXT_INITIALIZED, context, start_with_server
    )


def started() -> None:
    """Initialise TensorFlow's context, and with it the server, unless already done."""
    tf_internals.context().ensure_initialized()


def abort(reason: str, status: int = tf.errors.CANCELLED) -> None:
    """Make all running collective ops fail, here and on ranks that wait for this one.

    TensorFlow executes no more collective ops in this process after that.
    """
    context = tf_internals.context()
    if tf_internals.is_running(context):
        context.abort_collective_ops(status, reason)


def _configure(context: tf_internals.EagerContext, task: ClusterTask) -> None:
    own = f"/job:{task.job}/task:{task.index}"
    context.configure_collective_ops(
        collective_leader=task.leader, device_filters=(own,)
    )
    server = tf.train.ServerDef(
        job_name=task.job, task_index=task.index, protocol="grpc"
    )
    for name, addresses in task.cluster.items():
        job = server.cluster.job.add(name=name)
        for index, address in enumerate(addresses):
            job.tasks[index] = address
    config = server.default_session_config
    config.CopyFrom(context.config)
    config.experimental.collective_group_leader = task.leader
    config.experimental.recv_buf_max_chunk = _CHUNK_BYTES
    config.rpc_options.num_channels_per_target = _CHANNELS
    config.device_filters[:] = [own]
    context.enable_collective_ops(server)
