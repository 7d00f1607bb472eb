"""Lets workers wait for the chief to initialise the variables, but not forever.

Patches the methods of ``SessionManager`` that wait; all managed sessions of TensorFlow
1 use them. A worker whose variables have other names than the chief's would wait
forever for their initialisation. So the chief writes a list of its variables to a
parameter server, and the other workers compare it with their own list.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfcluster.runtime import contract, tf_internals
from tfcluster.runtime.errors import CollectiveMismatchError, CollectiveTimeoutError
from tfcluster.runtime.tensor_types import Graph, Operation, Tensor
from tfcluster.runtime.tf1 import patches
from tfcluster.runtime.tf1.cluster_members import Workers
from tfcluster.runtime.tf1.ps_reachability import wait_policy
from tfcluster.runtime.tf1_types import ConfigProto, V1Session

tf1 = tf.compat.v1

_RECOVERY_WAIT_S = 1.0
"""TensorFlow polls every 30 s."""


def guard(workers: Workers) -> None:
    """Make managed sessions compare the variables that the default graph has now."""
    add_list(workers)
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
    original: Callable[..., V1Session],
    manager: tf_internals.SessionManager,
    master: str,
    *args: Any,
    **kwargs: Any,
) -> V1Session:
    variable_list = list_of(tf_internals.graph_of_manager(manager))
    if (
        variable_list is not None
        and variable_list.workers.attempt
        and _is_known(variable_list, master)
    ):
        # This task was restarted, and its peers train on the variables, so keep them.
        wait: Callable[..., V1Session] = contract.original_of(patches.WAIT_FOR_SESSION)
        return wait(manager, master, kwargs.get("config"))
    session = original(manager, master, *args, **kwargs)
    if variable_list is not None and variable_list.workers.is_chief:
        session.run(variable_list.write)
    return session


def _wait(
    original: Callable[..., V1Session],
    manager: tf_internals.SessionManager,
    master: str,
    config: ConfigProto | None = None,
    max_wait_secs: float = math.inf,
) -> V1Session:
    graph = tf_internals.graph_of_manager(manager)
    variable_list = list_of(graph)
    if variable_list is None:
        return original(manager, master, config, max_wait_secs)
    chief = variable_list.workers.tasks[0]
    waiting = wait_policy(f"waiting for {chief}, the chief, to initialise variables")
    with tf1.Session(master, graph=graph, config=config) as session:
        while not compare(variable_list, session.run):
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


def _is_known(variable_list: VariableList, master: str) -> bool:
    """Whether the chief wrote its list before this task was restarted."""
    with tf1.Session(master, graph=variable_list.is_written.graph) as session:
        return compare(variable_list, session.run)


# --- the comparison of graphs ---------------------------------------------------------


_KEY = "tfcluster_layout"


@dataclass(frozen=True, slots=True)
class VariableList:
    """The ops of one graph that write the list and read it."""

    workers: Workers
    text: str
    is_written: Tensor
    value: Tensor
    write: Operation


def add_list(workers: Workers) -> None:
    """Add the ops to the default graph, for the variables that it has now."""
    graph = tf1.get_default_graph()
    text = json.dumps(_described())
    with (
        graph.as_default(),
        tf1.control_dependencies(None),
        tf1.device(workers.ps_devices[0]),
    ):
        variable = tf1.Variable(
            "",
            # In no collection, so that it is not saved, and nothing waits for it.
            collections=[],
            trainable=False,
            use_resource=True,
            name=_KEY,
        )
        variable_list = VariableList(
            workers,
            text,
            variable.is_initialized(),
            variable.read_value(),
            variable.assign(text).op,
        )
    # Not in a collection: TensorFlow warns about collections that it cannot save.
    contract.mark(graph, _KEY, variable_list)


def list_of(graph: Graph) -> VariableList | None:
    """The list of a graph for which ``add_list`` was called, or None."""
    variable_list: VariableList | None = getattr(graph, _KEY, None)
    return variable_list


def compare(variable_list: VariableList, run: Callable[[Tensor], Any]) -> bool:
    """Whether the chief has written its list.

    Raises CollectiveMismatchError if this worker's list differs.
    """
    if not run(variable_list.is_written):
        return False
    text = run(variable_list.value).decode()
    if text == variable_list.text:
        return True
    workers = variable_list.workers
    raise CollectiveMismatchError(
        f"{workers.task_type}:{workers.task_index} has a different model from "
        f"{workers.tasks[0]}, the chief: "
        f"{difference(json.loads(text), json.loads(variable_list.text))}. All tasks "
        "must build the same graph"
    )


def difference(chief: Mapping[str, str], own: Mapping[str, str]) -> str:
    """One sentence that says which variables are missing, extra or different."""
    missing = [f"{name} {chief[name]}" for name in chief if name not in own]
    extra = [f"{name} {own[name]}" for name in own if name not in chief]
    other = [
        f"{name} is {own[name]}, on the chief {chief[name]}"
        for name in own
        if name in chief and chief[name] != own[name]
    ]
    parts = [
        f"{what} {', '.join(names)}"
        for what, names in (
            ("missing here:", missing),
            ("not on the chief:", extra),
            ("different:", other),
        )
        if names
    ]
    return "; ".join(parts) or "the same variables in a different order"


def _described() -> dict[str, str]:
    """Dtype, shape and device of each global variable, by name."""
    return {
        variable.op.name: (
            f"{variable.dtype.base_dtype.name} {variable.shape} on "
            f"{variable.device or 'no device'}"
        )
        for variable in tf1.global_variables()
    }
