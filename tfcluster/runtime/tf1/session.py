"""TensorFlow 1 sessions that can exchange with other ranks, and the run's cluster."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfcluster.runtime import process_group, tf_server
from tfcluster.runtime.exchange.error_translation import translated
from tfcluster.runtime.exchange.gather_broadcast import broadcast_global_variables
from tfcluster.runtime.tensor_types import Graph, Nest, Operation
from tfcluster.runtime.tf1.cluster_formats import jobs_of
from tfcluster.runtime.tf1_types import ConfigProto, Coordinator, Server, V1Session

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
    jobs = process_group.context().cluster
    return tf.train.ClusterSpec({job: list(tasks) for job, tasks in jobs.items()})


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
    merged: ConfigProto = tf1.ConfigProto()
    if config is not None:
        merged.CopyFrom(config)
    if not merged.device_filters:
        merged.device_filters.extend(device_filters())
    gpus = len(tf.config.list_physical_devices("GPU"))
    if gpus and not merged.gpu_options.visible_device_list:
        number = process_group.local_rank() % gpus
        merged.gpu_options.visible_device_list = str(number)
    if not merged.inter_op_parallelism_threads:
        # The first local session decides the number of threads for the whole process.
        merged.inter_op_parallelism_threads = _THREADS
    return merged


class Session(tf.compat.v1.Session):  # type: ignore[misc]  # untyped
    """A ``tf.compat.v1.Session`` that can exchange and initialises its variables.

    Its config is ``session_config(config)``. Without a ``target`` the session belongs
    to this process alone, and the graph's variables and tables are initialised at once.
    A server's variables may be shared with other workers and are not touched. ``run``
    raises the errors of exchanges unchanged. The constructor raises what ``init`` and
    ``session_config`` raise.
    """

    def __init__(
        self,
        target: str = "",
        graph: Graph | None = None,
        config: ConfigProto | None = None,
    ) -> None:
        process_group.init()
        options = session_config(config)
        if not target:
            # The filters name devices of a cluster to which this session does not
            # belong.
            del options.device_filters[:]
            options.use_per_session_threads = True
        super().__init__(target, graph, config=options)
        if not target:
            _initialise(self)

    def run(self, fetches: Nest, *args: Any, **kwargs: Any) -> Any:
        """Like TensorFlow's method; integers such as ``rank()`` are returned unchanged.

        Returns values in the structure of ``fetches``. Raises the CollectiveError of an
        exchange instead of TensorFlow's error with its text.
        """
        flat = tf.nest.flatten(fetches)
        if not any(map(_is_number, flat)):
            with translated():
                return super().run(fetches, *args, **kwargs)
        others = [fetch for fetch in flat if not _is_number(fetch)]
        values = iter(self.run(others, *args, **kwargs) if others else ())
        results = [fetch if _is_number(fetch) else next(values) for fetch in flat]
        return tf.nest.pack_sequence_as(fetches, results)


def _initialise(session: Session) -> None:
    with session.graph.as_default():
        # Not global_variables_initializer and the like: each call adds ops to the
        # graph.
        initialisers = [
            *(v.initializer for v in tf1.global_variables()),
            *(v.initializer for v in tf1.local_variables()),
            *tf1.get_collection(tf1.GraphKeys.TABLE_INITIALIZERS),
        ]
    if initialisers:
        session.run(initialisers)


def _is_number(fetch: object) -> bool:
    return isinstance(fetch, int)


class BroadcastGlobalVariablesHook(
    tf.compat.v1.train.SessionRunHook  # type: ignore[misc]  # untyped
):
    """Sets the global variables to rank ``root_rank``'s when a session starts.

    Follows ``BroadcastGlobalVariablesHook`` of horovod/tensorflow/__init__.py.
    ``device`` is ignored. Its methods raise what ``broadcast_global_variables`` raises.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self._root_rank = root_rank
        self._op: Operation | None = None

    def begin(self) -> None:
        """Add the op to the default graph, once."""
        graph = tf1.get_default_graph()
        if self._op is None or self._op.graph is not graph:
            self._op = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: V1Session, coord: Coordinator) -> None:
        """Run the op. Raises the CollectiveError of the exchange."""
        with translated():
            session.run(self._op)
