"""Checks that all workers have variables with the same names and shapes.

A worker whose variables have other names than the chief's would wait forever for their
initialisation. So the chief writes a list of its variables to a parameter server, and
the other workers compare it with their own list.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfcluster.runtime import contract
from tfcluster.runtime.errors import CollectiveMismatchError
from tfcluster.runtime.tensor_types import Graph, Operation, Tensor
from tfcluster.runtime.tf1.cluster_members import Workers

tf1 = tf.compat.v1

_KEY = "tfcluster_layout"


@dataclass(frozen=True, slots=True)
class VariableList:
    """The ops of one graph that write the list and read it."""

    workers: Workers
    text: str
    is_written: Tensor
    value: Tensor
    write: Operation


def add(workers: Workers) -> None:
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


def of(graph: Graph) -> VariableList | None:
    """The list of a graph for which ``add`` was called, or None."""
    found: VariableList | None = getattr(graph, _KEY, None)
    return found


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
