"""Workers wait for the chief to initialise the variables, but not for ever.

Stands before the methods of ``SessionManager`` that do so, which all of TensorFlow 1's
managed sessions use.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import tensorflow as tf

from tfcluster.runtime.errors import CollectiveTimeoutError
from tfcluster.runtime.tf1 import model_check
from tfcluster.runtime.tf1.cluster_members import Workers
from tfcluster.runtime.tf1.wait_policy import patience

tf1 = tf.compat.v1

_RECOVERY_WAIT_S = 1.0
"""TensorFlow looks every 30 s."""


def guard(workers: Workers) -> None:
    """Compare the default graph, as it is by now, in sessions that are managed."""
    model_check.add(workers)
    watch()


@functools.cache
def watch() -> None:
    """From now on, for graphs that are to be compared."""
    manager = tf1.train.SessionManager
    prepare, wait = manager.prepare_session, manager.wait_for_session

    @functools.wraps(prepare)
    def prepared(self: Any, master: str, *args: Any, **kwargs: Any) -> Any:
        found = model_check.of(self._graph)
        if found is not None and found.workers.attempt and _is_known(found, master):
            # Others train on what it has initialised: it goes on with that.
            return wait(self, master, kwargs.get("config"))
        session = prepare(self, master, *args, **kwargs)
        if found is not None and found.workers.is_chief:
            session.run(found.leave)
        return session

    @functools.wraps(wait)
    def waited(
        self: Any, master: str, config: Any = None, max_wait_secs: float = math.inf
    ) -> Any:
        found = model_check.of(self._graph)
        if found is None:
            return wait(self, master, config, max_wait_secs)
        chief = found.workers.tasks[0]
        waiting = patience(f"waiting for {chief}, the chief, to initialise variables")
        with tf1.Session(master, graph=self._graph, config=config) as session:
            while not model_check.compare(found, session.run):
                waiting.wait()
        self._recovery_wait_secs = min(self._recovery_wait_secs, _RECOVERY_WAIT_S)
        left_s = waiting.left_s
        try:
            # With the chief's list the variables are there: this returns at once.
            return wait(
                self, master, config, max_wait_secs if left_s is None else left_s
            )
        except tf.errors.DeadlineExceededError as error:
            raise CollectiveTimeoutError(f"{waiting.what}: {error.message}") from error

    manager.prepare_session = prepared
    manager.wait_for_session = waited


def _is_known(found: model_check.VariableList, master: str) -> bool:
    """Whether the chief has left its list before this task was started again."""
    with tf1.Session(master, graph=found.there.graph) as session:
        return model_check.compare(found, session.run)
