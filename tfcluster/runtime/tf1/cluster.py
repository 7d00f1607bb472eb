"""TF_CONFIG's cluster for programs of TensorFlow 1: its spec, a server, a config."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfcluster.runtime import process_group, tf_server
from tfcluster.runtime.tf1.cluster_formats import jobs_of

tf1 = tf.compat.v1

_THREADS = 64
"""Exchanges of a graph that wait for other ranks each hold a thread."""


def cluster_spec(cluster: Any = None) -> Any:
    """TF_CONFIG's cluster as a ``tf.train.ClusterSpec``; empty without one.

    The evaluator stands outside of it. Or ``cluster``: a dict, another ClusterSpec, a
    ClusterDef. Raises ContextError where TF_CONFIG or that is wrong.
    """
    if cluster is not None:
        return tf.train.ClusterSpec(jobs_of(cluster))
    found = process_group.context().cluster
    return tf.train.ClusterSpec({job: list(tasks) for job, tasks in found.items()})


def server() -> Any:
    """A new, running ``tf.distribute.Server`` for this task, on its own address.

    Raises ContextError where TF_CONFIG has no address for it.
    """
    return tf_server.start(process_group.context())


def device_filters() -> list[str]:
    """The devices that this task's sessions on a server see; empty: all of them.

    Beside parameter servers that is they and this task: so nobody waits for a worker
    that is missing.
    """
    return list(tf_server.filters_of(process_group.context()))


def session_config(config: Any = None) -> Any:
    """A copy of a ``tf.compat.v1.ConfigProto`` with what sessions of a rank need.

    What ``config`` says itself stays. Added are the device filters, the one GPU of this
    local rank where several are visible, and threads enough for exchanges that wait.
    """
    made = tf1.ConfigProto()
    if config is not None:
        made.CopyFrom(config)
    if not made.device_filters:
        made.device_filters.extend(device_filters())
    gpus = len(tf.config.list_physical_devices("GPU"))
    if gpus and not made.gpu_options.visible_device_list:
        number = process_group.local_rank() % gpus
        made.gpu_options.visible_device_list = str(number)
    if not made.inter_op_parallelism_threads:
        # Local sessions of a process share as many as the first of them asks for.
        made.inter_op_parallelism_threads = _THREADS
    return made
