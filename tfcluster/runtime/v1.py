"""For programs of TensorFlow 1: clusters, servers and sessions. Needs no Keras."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfcluster.runtime import serving, world
from tfcluster.runtime.api.ops import translated
from tfcluster.runtime.api.variables import broadcast_global_variables

tf1 = tf.compat.v1

_THREADS = 64
"""Exchanges of a graph that wait for other ranks each hold a thread."""


def cluster_spec() -> Any:
    """TF_CONFIG's cluster as a ``tf.train.ClusterSpec``; empty without one.

    The evaluator stands outside of it. Raises ContextError where TF_CONFIG is wrong.
    """
    found = world.context().cluster
    return tf.train.ClusterSpec({job: list(tasks) for job, tasks in found.items()})


def server() -> Any:
    """A new, running ``tf.distribute.Server`` for this task, on its own address.

    Raises ContextError where TF_CONFIG has no address for it.
    """
    return serving.start(world.context())


def device_filters() -> list[str]:
    """The devices that this task's sessions on a server see; empty: all of them.

    Beside parameter servers that is they and this task: so nobody waits for a worker
    that is missing.
    """
    return list(serving.filters_of(world.context()))


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
        number = world.local_rank() % gpus
        made.gpu_options.visible_device_list = str(number)
    if not made.inter_op_parallelism_threads:
        # Local sessions of a process share as many as the first of them asks for.
        made.inter_op_parallelism_threads = _THREADS
    return made


class Session(tf.compat.v1.Session):  # type: ignore[misc]  # untyped
    """A ``tf.compat.v1.Session`` that is ready to exchange, and has its variables.

    Its config is ``session_config(config)``. In a session of this process alone (no
    ``target``) the graph's variables and tables are initialised at once; a server's
    variables may be others' too, and stay as they are. What an exchange raises, ``run``
    raises.
    """

    def __init__(self, target: str = "", graph: Any = None, config: Any = None) -> None:
        world.init()
        options = session_config(config)
        if not target:
            # They name devices of a cluster, which this session has no part in.
            del options.device_filters[:]
            options.use_per_session_threads = True
        super().__init__(target, graph, config=options)
        if not target:
            self._initialise()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with translated():
            return super().run(*args, **kwargs)

    def _initialise(self) -> None:
        with self.graph.as_default():
            # Not the functions of that name: each call adds ops to the graph.
            initialisers = [
                *(v.initializer for v in tf1.global_variables()),
                *(v.initializer for v in tf1.local_variables()),
                *tf1.get_collection(tf1.GraphKeys.TABLE_INITIALIZERS),
            ]
        if initialisers:
            self.run(initialisers)


class BroadcastGlobalVariablesHook(
    tf.compat.v1.train.SessionRunHook  # type: ignore[misc]  # untyped
):
    """Sets the global variables to rank ``root_rank``'s when a session begins."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self._root_rank = root_rank
        self._op: Any = None

    def begin(self) -> None:
        graph = tf1.get_default_graph()
        if self._op is None or self._op.graph is not graph:
            self._op = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        with translated():
            session.run(self._op)
