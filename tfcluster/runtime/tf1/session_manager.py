"""Lets workers wait for the chief to initialise the variables, but not forever.

Patches the methods of ``SessionManager`` that wait; all managed sessions of TensorFlow
1 use them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfcluster.runtime import contract, tf_internals
from tfcluster.runtime.errors import CollectiveTimeoutError
from tfcluster.runtime.tf1 import model_check, patches
from tfcluster.runtime.tf1.cluster_members import Workers
from tfcluster.runtime.tf1.ps_reachability import wait_policy
from tfcluster.runtime.tf1_types import ConfigProto, Session

tf1 = tf.compat.v1

_RECOVERY_WAIT_S = 1.0
"""TensorFlow polls every 30 s."""


def guard(workers: Workers) -> None:
    """Make managed sessions compare the variables that the default graph has now."""
    model_check.add(workers)
    watch()


def watch() -> None:
    """Patch ``SessionManager`` for graphs with a list of variables to compare.

    Raises CollectiveError if TensorFlow lacks something that this needs.
    """
    patches.check()
    patches.TABLE.install(
        {patches.PREPARE_SESSION: _prepare, patches.WAIT_FOR_SESSION: _wait},
        always=True,
    )


def _prepare(
    original: Callable[..., Session],
    manager: tf_internals.SessionManager,
    master: str,
    *args: Any,
    **kwargs: Any,
) -> Session:
    found = model_check.of(tf_internals.graph_of_manager(manager))
    if found is not None and found.workers.attempt and _is_known(found, master):
        # This task was restarted, and its peers train on the variables, so keep them.
        wait: Callable[..., Session] = contract.original_of(patches.WAIT_FOR_SESSION)
        return wait(manager, master, kwargs.get("config"))
    session = original(manager, master, *args, **kwargs)
    if found is not None and found.workers.is_chief:
        session.run(found.write)
    return session


def _wait(
    original: Callable[..., Session],
    manager: tf_internals.SessionManager,
    master: str,
    config: ConfigProto | None = None,
    max_wait_secs: float = math.inf,
) -> Session:
    graph = tf_internals.graph_of_manager(manager)
    found = model_check.of(graph)
    if found is None:
        return original(manager, master, config, max_wait_secs)
    chief = found.workers.tasks[0]
    waiting = wait_policy(f"waiting for {chief}, the chief, to initialise variables")
    with tf1.Session(master, graph=graph, config=config) as session:
        while not model_check.compare(found, session.run):
            waiting.wait()
    tf_internals.look_more_often(manager, _RECOVERY_WAIT_S)
    left_s = waiting.left_s
    try:
        # The chief writes its list after the variables, so this returns at once.
        return original(
            manager, master, config, max_wait_secs if left_s is None else left_s
        )
    except tf.errors.DeadlineExceededError as error:
        raise CollectiveTimeoutError(f"{waiting.what}: {error.message}") from error


def _is_known(found: model_check.VariableList, master: str) -> bool:
    """Whether the chief wrote its list before this task was restarted."""
    with tf1.Session(master, graph=found.is_written.graph) as session:
        return model_check.compare(found, session.run)
