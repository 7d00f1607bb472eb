"""One copy of the variables, on the parameter servers; every worker reads it.

Each worker runs the model on its towers, averages their gradients and applies the mean
on the parameter servers. Then all workers wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfcluster.runtime.tensor_types import Tensor
from tfcluster.runtime.tf1.caching import THRESHOLD_BYTES, caches
from tfcluster.runtime.tf1.cluster_members import Workers
from tfcluster.runtime.tf1.graph_builder import GraphBuilder
from tfcluster.runtime.tf1.graph_result import Training
from tfcluster.runtime.tf1.towers import Gradients
from tfcluster.runtime.tf1_types import V1Optimizer

tf1 = tf.compat.v1


def parameter_server_graph(
    loss: Callable[[int], Tensor],
    optimizer: V1Optimizer,
    *,
    workers: Workers | None = None,
    towers: Sequence[str] = ("cpu:0",),
    caching: str = "cpu",
    caching_threshold_bytes: int = THRESHOLD_BYTES,
    mean: bool = False,
    barrier: bool = True,
    name: str = "training",
) -> Training:
    """Build a graph whose variables live on the parameter servers.

    ``loss(tower)`` builds the model with ``get_variable`` and returns the mean loss of
    that tower's rows, a scalar of a floating dtype. ``towers`` are devices of this
    task, such as "gpu:0". Each variable goes to the ps with the fewest bytes. A worker
    reads it once per step, into host memory (``caching='cpu'``) or into the memory of
    its towers (``'gpu'``); variables with fewer than ``caching_threshold_bytes`` bytes
    stay on one device.

    Each worker's gradient is the mean over its towers. It is applied separately, so
    that N workers make N updates per step. With ``mean=True``, the mean over all
    workers is applied as one update. ``barrier=False`` lets a worker continue without
    waiting for the others. A second graph in the same run needs another ``name``,
    because tokens of the first graph's barriers may remain on the parameter servers.

    Raises ValueError for ``mean=True`` without a barrier, for another ``caching``, and
    for malformed towers; ContextError if this task does not train or there is no ps;
    CollectiveMismatchError if a variable has a gradient in some towers only. Follows
    ``DistributedParameterServerBuilder`` of tensorpack/graph_builder/distributed.py.
    """
    if mean and not barrier:
        raise ValueError("mean=True makes workers wait for each other: barrier=True")
    graph = GraphBuilder(optimizer, workers, towers, name)
    copies = caches(caching, graph.cpu, graph.towers, caching_threshold_bytes)
    losses: list[Tensor] = []
    gradients: list[Gradients] = []
    for tower, device in enumerate(graph.towers):
        with (
            tf1.device(graph.setter(device)),
            tf1.variable_scope(
                tf1.get_variable_scope(),
                custom_getter=copies.cached,
                reuse=True if tower else None,
            ),
            tf1.name_scope(f"tower{tower}"),
        ):
            losses.append(loss(tower))
            gradients.append(
                optimizer.compute_gradients(
                    losses[-1], tf1.trainable_variables(), gate_gradients=0
                )
            )
    variables = [variable for _, variable in gradients[0]]
    with tf1.device(graph.setter(graph.cpu)):
        last, left = graph.applied(gradients, variables, mean=mean)
        if barrier:
            passed = graph.barriers.after("all_workers_sync_barrier", [last])
            last, left = passed.op, tf1.logical_or(left, passed.left)
    return graph.training(last, left, losses, variables)
