"""A copy of the model on each tower, and the master copy on the parameter servers.

Gradients are averaged over a worker's towers and applied to the master copy. When all
workers have done so, each of them copies it back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfcluster.runtime.tf1 import session_manager
from tfcluster.runtime.tf1.accumulators import applied_mean
from tfcluster.runtime.tf1.barrier import Barriers
from tfcluster.runtime.tf1.cluster_members import Workers
from tfcluster.runtime.tf1.cluster_members import workers as all_workers
from tfcluster.runtime.tf1.graph_result import Together, Training, remembered
from tfcluster.runtime.tf1.master_copies import (
    MasterCopies,
    copied,
    local,
    pushed,
    require_own,
    scope_of,
    shadow,
)
from tfcluster.runtime.tf1.placement import ByBytes
from tfcluster.runtime.tf1.towers import device_of, mean_gradients, mean_loss

tf1 = tf.compat.v1


def replicated_graph(
    loss: Callable[[int], Any],
    optimizer: Any,
    *,
    workers: Workers | None = None,
    towers: Sequence[str] = ("cpu:0",),
    mean: bool = False,
    name: str = "training",
) -> Training:
    """Build a graph in which each tower has its own copy of the variables.

    ``loss(tower)`` builds the model with ``get_variable`` and returns the mean loss of
    that tower's rows. After each step all copies on all workers equal the master copy.
    The optimizer's slot variables are on the parameter servers.

    Non-trainable variables in ``tf.GraphKeys.MODEL_VARIABLES``, such as moving
    averages, stay different in each tower. ``sync_model_variables`` copies the chief's
    to the parameter servers whenever the caller runs it.

    ``mean=True`` applies the mean of all workers' gradients as one update; otherwise
    each worker's gradient is applied on its own. A second graph in the same run needs
    another ``name``, as for ``parameter_server_graph``.
    """
    workers = workers or all_workers()
    cpu = device_of(workers.device, "cpu:0")
    devices = [device_of(workers.device, tower) for tower in towers]
    placed = ByBytes(len(workers.ps_devices))
    setter = tf1.train.replica_device_setter(
        cluster=tf1.train.ClusterSpec(
            {job: list(found) for job, found in workers.cluster.items()}
        ),
        worker_device=cpu,
        ps_strategy=placed,
    )
    with tf1.device(setter):
        global_step = tf1.train.get_or_create_global_step()

    before = tf1.global_variables()
    losses = []
    for tower, device in enumerate(devices):
        with (
            tf1.device(device),
            tf1.variable_scope(scope_of(tower), custom_getter=local),
        ):
            losses.append(loss(tower))
    require_own(before)
    trained = MasterCopies(tf1.GraphKeys.TRAINABLE_VARIABLES, len(devices))
    gradients = []
    for tower, device in enumerate(devices):
        with tf1.device(device):
            gradients.append(
                optimizer.compute_gradients(losses[tower], trained.in_tower(tower))
            )

    barriers = Barriers(workers, name)
    with tf1.device(setter):
        masters = {
            name: shadow(trained.of(name)[0], name, trainable=True)
            for name in trained.names
        }
        kept = _model_masters(len(devices), masters)
        pairs = list(zip(mean_gradients(gradients, cpu), masters.values(), strict=True))
        left = tf1.constant(False)
        if mean:
            applied, left = applied_mean(
                optimizer, pairs, global_step, workers, barriers
            )
        else:
            applied = optimizer.apply_gradients(pairs, global_step=global_step)
        # One barrier for all variables: none is read before all workers have applied
        # theirs.
        all_applied = barriers.after("gradients_applied", [applied])
        with tf1.control_dependencies([all_applied.op]):
            copies = [
                op
                for name, master in masters.items()
                for op in copied(master, trained.of(name))
            ]
        # And no worker applies its next gradients before all have read.
        all_copied = barriers.after("post_copy_barrier", copies)
        left = tf1.reduce_any([left, all_applied.left, all_copied.left])
        known, noted = remembered(left, cpu)
        initial = tf1.group(
            *(
                op
                for name, master in masters.items()
                for op in copied(master, trained.of(name))
            ),
            *(op for master, found in kept for op in copied(master, found)),
            name=f"sync_{len(masters) + len(kept)}_variables_from_ps",
        )
        model = None
        if kept and workers.is_chief:
            model = tf1.group(
                *(pushed(found[0], master) for master, found in kept),
                name=f"sync_{len(kept)}_model_variables_to_ps",
            )
    session_manager.guard(workers)
    return Training(
        train_op=tf1.group(all_copied.op, noted, name="train_op"),
        loss=mean_loss(losses, cpu),
        global_step=global_step,
        barriers=len(barriers),
        hook=Together(left=known, farewell=barriers.farewell(), initial=initial),
        sync_initial=initial,
        sync_model_variables=model,
        bytes_held=placed.bytes_held,
        masters=(*masters.values(), *(master for master, _ in kept)),
    )


def _model_masters(towers: int, masters: dict[str, Any]) -> list[tuple[Any, list[Any]]]:
    """Master copies of non-trainable model variables, each with the towers' copies."""
    found = MasterCopies(tf1.GraphKeys.MODEL_VARIABLES, towers)
    return [
        (shadow(found.of(name)[0], name, trainable=False), found.of(name))
        for name in found.names
        if name not in masters
    ]
