"""Sessions of TensorFlow 1 that are ready to exchange with other ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfcluster.runtime import world
from tfcluster.runtime.api.ops import translated
from tfcluster.runtime.api.variables import broadcast_global_variables
from tfcluster.runtime.v1.cluster import session_config

tf1 = tf.compat.v1


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
