"""A copy of the model on each tower, and the master copy on the parameter servers.

Gradients are averaged over a worker's towers and applied to the master copy. When all
workers have done so, each worker copies the master copy back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfcluster.runtime.errors import CollectiveMismatchError
from tfcluster.runtime.tensor_types import Operation, Tensor, Variable
from tfcluster.runtime.tf1.cluster_members import Workers
from tfcluster.runtime.tf1.graph_builder import (
    GraphBuilder,
    Training,
    require_same,
)
from tfcluster.runtime.tf1_types import V1Optimizer

tf1 = tf.compat.v1


def replicated_graph(
    loss: Callable[[int], Tensor],
    optimizer: V1Optimizer,
    *,
    workers: Workers | None = None,
    towers: Sequence[str] = ("cpu:0",),
    mean: bool = False,
    name: str = "training",
) -> Training:
    """Build a graph in which each tower has its own copy of the variables.

    ``loss(tower)`` builds the model with ``get_variable`` and returns the mean loss of
    that tower's rows, a scalar of a floating dtype. After each step all copies on all
    workers equal the master copy. The optimizer's slot variables are on the parameter
    servers.

    Non-trainable variables in ``tf.GraphKeys.MODEL_VARIABLES``, such as moving
    averages, stay different in each tower. ``sync_model_variables`` copies the chief's
    values to the parameter servers whenever the caller runs it.

    ``mean=True`` applies the mean of all workers' gradients as one update; otherwise
    each worker's gradient is applied separately. A second graph in the same run needs
    another ``name``, as for ``parameter_server_graph``.

    Raises CollectiveMismatchError if the towers have different variables, if a tower
    creates variables outside of its scope, and if a variable has a gradient in some
    towers only; otherwise what ``parameter_server_graph`` raises for the same
    arguments. Follows ``DistributedReplicatedBuilder`` of
    tensorpack/graph_builder/distributed.py.
    """
    graph = GraphBuilder(optimizer, workers, towers, name)
    before = tf1.global_variables()
    losses = []
    for tower, device in enumerate(graph.towers):
        with (
            tf1.device(device),
            tf1.variable_scope(scope_of(tower), custom_getter=local),
        ):
            losses.append(loss(tower))
    require_own(before)
    trained = MasterCopies(tf1.GraphKeys.TRAINABLE_VARIABLES, len(graph.towers))
    gradients = []
    for tower, device in enumerate(graph.towers):
        with tf1.device(device):
            gradients.append(
                optimizer.compute_gradients(losses[tower], trained.in_tower(tower))
            )

    with tf1.device(graph.setter(graph.cpu)):
        weights = _master_copies(trained, trained.names, trainable=True)
        averaged = MasterCopies(tf1.GraphKeys.MODEL_VARIABLES, len(graph.towers))
        others = [name for name in averaged.names if name not in trained.names]
        statistics = _master_copies(averaged, others, trainable=False)
        variables = [variable for variable, _ in weights]
        applied, left = graph.applied(gradients, variables, mean=mean)
        # There is one barrier for all variables: none is read before all workers have
        # applied their gradients.
        all_applied = graph.barriers.after("gradients_applied", [applied])
        with tf1.control_dependencies([all_applied.op]):
            updated = _copied(weights)
        # No worker applies its next gradients before all workers have read.
        all_copied = graph.barriers.after("post_copy_barrier", updated)
        left = tf1.reduce_any([left, all_applied.left, all_copied.left])
        master_copies = weights + statistics
        initial = tf1.group(
            *_copied(master_copies), name=f"sync_{len(master_copies)}_variables_from_ps"
        )
        model_variables = None
        if statistics and graph.workers.is_chief:
            model_variables = tf1.group(
                *(pushed(copies[0], variable) for variable, copies in statistics),
                name=f"sync_{len(statistics)}_model_variables_to_ps",
            )
    return graph.training(
        all_copied.op,
        left,
        losses,
        [variable for variable, _ in master_copies],
        initial=initial,
        model_variables=model_variables,
    )


def _master_copies(
    towers: MasterCopies, names: Iterable[str], *, trainable: bool
) -> list[tuple[Variable, list[Variable]]]:
    """Create variables on the parameter servers, each paired with the towers' own."""
    return [
        (
            create_master_copy(towers.of(name)[0], name, trainable=trainable),
            towers.of(name),
        )
        for name in names
    ]


def _copied(
    master_copies: Iterable[tuple[Variable, Sequence[Variable]]],
) -> list[Operation]:
    """Ops that set the towers' variables to the values on the parameter servers."""
    return [op for variable, copies in master_copies for op in copied(variable, copies)]


# --- master copies --------------------------------------------------------------------


def scope_of(tower: int) -> str:
    """The name of a tower's variable scope."""
    return f"tower{tower}"


def local(getter: Callable[..., Variable], name: str, **options: Any) -> Variable:
    """A ``custom_getter`` for variable scopes; makes variables local to the worker."""
    wanted = list(options.get("collections") or [tf1.GraphKeys.GLOBAL_VARIABLES])
    options["collections"] = [
        tf1.GraphKeys.LOCAL_VARIABLES if key == tf1.GraphKeys.GLOBAL_VARIABLES else key
        for key in wanted
    ]
    return getter(name, **options)


def require_own(before: Sequence[Variable]) -> None:
    """Raise CollectiveMismatchError if a tower has created global variables.

    ``before`` are the global variables that existed before.
    """
    names_before = {variable.name for variable in before}
    foreign = [v.name for v in tf1.global_variables() if v.name not in names_before]
    if foreign:
        raise CollectiveMismatchError(
            "a tower must create its variables with tf.compat.v1.get_variable in the "
            f"current variable scope; these were not: {', '.join(foreign)}"
        )


class MasterCopies:
    """Each tower's variables in a collection, by their common name."""

    def __init__(self, collection: str, towers: int) -> None:
        self._towers = [
            {
                _without_scope(variable, tower): variable
                for variable in tf1.get_collection(collection)
                if variable.name.startswith(f"{scope_of(tower)}/")
            }
            for tower in range(towers)
        ]
        require_same([list(by_name) for by_name in self._towers])

    @property
    def names(self) -> list[str]:
        """The names in the order of creation."""
        return list(self._towers[0])

    def of(self, name: str) -> list[Variable]:
        """The variable with that name in each tower."""
        return [by_name[name] for by_name in self._towers]

    def in_tower(self, tower: int) -> list[Variable]:
        """One tower's variables, in the order of ``names``."""
        return [self._towers[tower][name] for name in self.names]


def create_master_copy(copy: Variable, name: str, *, trainable: bool) -> Variable:
    """Create the master copy of ``copy``, with the same initial value."""
    master: Variable = tf1.get_variable(
        name,
        dtype=copy.dtype.base_dtype,
        initializer=copy.initial_value,
        trainable=trainable,
    )
    return master


def read(master: Variable) -> Tensor:
    """The value of ``master`` at this point of the graph.

    The value is read on the variable's own device: otherwise it may be sent before the
    ops on which this read depends have run.
    """
    with tf1.device(master.device):
        return tf1.identity(master.read_value())


def copied(master: Variable, copies: Sequence[Variable]) -> list[Operation]:
    """Ops that set each of ``copies`` to the value of ``master``."""
    value = read(master)
    return [copy.assign(value).op for copy in copies]


def pushed(copy: Variable, master: Variable) -> Operation:
    """An op that sets ``master`` to the value of ``copy``."""
    with tf1.device(copy.device):
        value = tf1.identity(copy.read_value())
    assignment: Operation = master.assign(value).op
    return assignment


def _without_scope(variable: Variable, tower: int) -> str:
    return str(variable.op.name).removeprefix(f"{scope_of(tower)}/")
