"""A copy of the model on each tower, and the master copy on the parameter servers.

Gradients are averaged over a worker's towers and applied to the master copy. When all
workers have done so, each worker copies the master copy back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from tfcluster.runtime.tensor_types import Operation, Tensor, Variable
from tfcluster.runtime.tf1.cluster_members import Workers
from tfcluster.runtime.tf1.graph_builder import GraphBuilder
from tfcluster.runtime.tf1.graph_result import Training
from tfcluster.runtime.tf1.master_copies import (
    MasterCopies,
    copied,
    create_master_copy,
    local,
    pushed,
    require_own,
    scope_of,
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
        found = MasterCopies(tf1.GraphKeys.MODEL_VARIABLES, len(graph.towers))
        others = [name for name in found.names if name not in trained.names]
        statistics = _master_copies(found, others, trainable=False)
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
