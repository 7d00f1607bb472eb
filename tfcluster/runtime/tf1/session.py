"""TensorFlow 1 sessions that can exchange with other ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfcluster.runtime import process_group
from tfcluster.runtime.exchange.error_translation import translated
from tfcluster.runtime.exchange.gather_broadcast import broadcast_global_variables
from tfcluster.runtime.tensor_types import Graph, Nest, Operation
from tfcluster.runtime.tf1.cluster import session_config
from tfcluster.runtime.tf1_types import ConfigProto, Coordinator
from tfcluster.runtime.tf1_types import Session as V1Session

tf1 = tf.compat.v1


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
        found = iter(self.run(others, *args, **kwargs) if others else ())
        results = [fetch if _is_number(fetch) else next(found) for fetch in flat]
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
