"""One copy of the variables, on the parameter servers; every worker reads it.

Each worker runs the model on its towers, averages their gradients and applies the mean
on the parameter servers. Then all workers wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfcluster.runtime.tf1 import session_manager
from tfcluster.runtime.tf1.accumulators import applied_mean
from tfcluster.runtime.tf1.barrier import Barriers
from tfcluster.runtime.tf1.caching import THRESHOLD_BYTES, caches
from tfcluster.runtime.tf1.cluster_members import Workers
from tfcluster.runtime.tf1.cluster_members import workers as all_workers
from tfcluster.runtime.tf1.graph_result import Together, Training, remembered
from tfcluster.runtime.tf1.placement import ByBytes
from tfcluster.runtime.tf1.towers import (
    Gradients,
    device_of,
    mean_gradients,
    mean_loss,
)

tf1 = tf.compat.v1


def parameter_server_graph(
    loss: Callable[[int], Any],
    optimizer: Any,
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
    that tower's rows. Each variable goes to the ps with the fewest bytes. A worker
    reads it once per step, into host memory (``caching='cpu'``) or that of its towers
    (``'gpu'``).

    Each worker's gradient is the mean over its towers. It is applied on its own, so
    that N workers make N updates per step. With ``mean=True`` the mean over all workers
    is applied as one update. ``barrier=False`` lets a worker continue without waiting
    for the others; it cannot be combined with ``mean=True``, which raises ValueError.

    A second graph in the same run needs another ``name``, because tokens of the first
    graph's barriers may remain on the parameter servers.
    """
    if mean and not barrier:
        raise ValueError("mean=True makes workers wait for each other: barrier=True")
    workers = workers or all_workers()
    cpu = device_of(workers.device, "cpu:0")
    devices = [device_of(workers.device, tower) for tower in towers]
    copies = caches(caching, cpu, devices, caching_threshold_bytes)
    placed = ByBytes(len(workers.ps_devices))

    def setter(device: str) -> Any:
        return tf1.train.replica_device_setter(
            cluster=tf1.train.ClusterSpec(
                {job: list(found) for job, found in workers.cluster.items()}
            ),
            worker_device=device,
            ps_strategy=placed,
        )

    with tf1.device(setter(cpu)):
        global_step = tf1.train.get_or_create_global_step()
    losses: list[Any] = []
    gradients: list[Gradients] = []
    for tower, device in enumerate(devices):
        with (
            tf1.device(setter(device)),
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
    masters = [variable for _, variable in gradients[0]]
    pairs = list(zip(mean_gradients(gradients, cpu), masters, strict=True))
    barriers = Barriers(workers, name)
    with tf1.device(setter(cpu)):
        if mean:
            applied, left = applied_mean(
                optimizer, pairs, global_step, workers, barriers
            )
        else:
            applied = optimizer.apply_gradients(pairs, global_step=global_step)
            left = tf1.constant(False)
        if barrier:
            last = barriers.after("all_workers_sync_barrier", [applied])
            left = tf1.logical_or(left, last.left)
            applied = last.op
        known, noted = remembered(left, cpu)
    session_manager.guard(workers)
    return Training(
        train_op=tf1.group(applied, noted, name="train_op"),
        loss=mean_loss(losses, cpu),
        global_step=global_step,
        barriers=len(barriers),
        hook=Together(left=known, farewell=barriers.farewell()),
        bytes_held=placed.bytes_held,
        masters=tuple(masters),
    )
