"""The cluster in TF_CONFIG for TensorFlow 1: its spec, a server, a session config."""

from __future__ import annotations

import tensorflow as tf

from tfcluster.runtime import process_group, tf_server
from tfcluster.runtime.tf1.cluster_formats import jobs_of
from tfcluster.runtime.tf1_types import ConfigProto, Server

tf1 = tf.compat.v1

_THREADS = 64
"""Each exchange that waits for other ranks occupies a thread."""


def cluster_spec(cluster: object = None) -> tf.train.ClusterSpec:
    """The cluster in TF_CONFIG as a ``tf.train.ClusterSpec``; empty without TF_CONFIG.

    The evaluator is not part of it. Alternatively converts ``cluster``: a dict, another
    ClusterSpec, a ClusterDef or a ServerDef. Raises ContextError if TF_CONFIG or
    ``cluster`` is invalid.
    """
    if cluster is not None:
        return tf.train.ClusterSpec(jobs_of(cluster))
    found = process_group.context().cluster
    return tf.train.ClusterSpec({job: list(tasks) for job, tasks in found.items()})


def server() -> Server:
    """A running ``tf.distribute.Server`` for this task, on its own address.

    With parameter servers, this is always the same server. Raises ContextError if
    TF_CONFIG has no address for it, and a ``tf.errors.OpError`` if TensorFlow cannot
    listen there.
    """
    return tf_server.start(process_group.context())


def device_filters() -> list[str]:
    """The devices that sessions of this task see; an empty list means all.

    If there are parameter servers, only they and this task are visible. So no session
    waits for a missing worker. Raises ContextError if TF_CONFIG is invalid.
    """
    return list(tf_server.filters_of(process_group.context()))


def session_config(config: ConfigProto | None = None) -> ConfigProto:
    """A copy of a ``tf.compat.v1.ConfigProto`` with the settings of a rank's sessions.

    Values set in ``config`` are kept. The added settings are the device filters, this
    local rank's GPU if several are visible, and enough threads for exchanges that wait.
    Raises ContextError if TF_CONFIG is invalid and, with GPUs, NoRankError in a ps or
    data task.
    """
    made: ConfigProto = tf1.ConfigProto()
    if config is not None:
        made.CopyFrom(config)
    if not made.device_filters:
        made.device_filters.extend(device_filters())
    gpus = len(tf.config.list_physical_devices("GPU"))
    if gpus and not made.gpu_options.visible_device_list:
        number = process_group.local_rank() % gpus
        made.gpu_options.visible_device_list = str(number)
    if not made.inter_op_parallelism_threads:
        # The first local session decides the number of threads for the whole process.
        made.inter_op_parallelism_threads = _THREADS
    return made
