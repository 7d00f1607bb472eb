"""The parts that all training graphs have in common, whichever copies they train on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfcluster.runtime.tensor_types import Operation, Tensor, Variable
from tfcluster.runtime.tf1 import session_manager
from tfcluster.runtime.tf1.accumulators import applied_mean
from tfcluster.runtime.tf1.barrier import Barriers
from tfcluster.runtime.tf1.cluster_members import Workers
from tfcluster.runtime.tf1.cluster_members import workers as all_workers
from tfcluster.runtime.tf1.graph_result import Training, TrainingHook, departure_flag
from tfcluster.runtime.tf1.placement import ByBytes
from tfcluster.runtime.tf1.towers import (
    Gradients,
    device_of,
    mean_gradients,
    mean_loss,
)
from tfcluster.runtime.tf1_types import V1Optimizer

tf1 = tf.compat.v1


class GraphBuilder:
    """Places variables on the parameter servers and applies the towers' gradients."""

    def __init__(
        self,
        optimizer: V1Optimizer,
        workers: Workers | None,
        towers: Sequence[str],
        name: str,
    ) -> None:
        self._optimizer = optimizer
        self.workers = workers or all_workers()
        self.cpu = device_of(self.workers.device, "cpu:0")
        self.towers = [device_of(self.workers.device, tower) for tower in towers]
        """The device of each tower."""
        self.barriers = Barriers(self.workers, name)
        self._placed = ByBytes(len(self.workers.ps_devices))
        with tf1.device(self.setter(self.cpu)):
            self._global_step = tf1.train.get_or_create_global_step()

    def setter(self, device: str) -> Callable[[Operation], str]:
        """Put variables on the parameter servers and everything else on ``device``."""
        return tf1.train.replica_device_setter(
            cluster=tf1.train.ClusterSpec(
                {job: list(found) for job, found in self.workers.cluster.items()}
            ),
            worker_device=device,
            ps_strategy=self._placed,
        )

    def applied(
        self, towers: Sequence[Gradients], variables: Sequence[Variable], *, mean: bool
    ) -> tuple[Operation, Tensor]:
        """The op that applies the mean gradient of ``towers`` to ``variables``.

        With ``mean`` it is the mean over all workers. Also returns a tensor that says
        whether any worker has left.
        """
        gradients = mean_gradients(towers, self.cpu)
        pairs = list(zip(gradients, variables, strict=True))
        if mean:
            return applied_mean(
                self._optimizer, pairs, self._global_step, self.workers, self.barriers
            )
        applied = self._optimizer.apply_gradients(pairs, global_step=self._global_step)
        return applied, tf1.constant(False)

    def training(
        self,
        last: Operation,
        left: Tensor,
        losses: Sequence[Tensor],
        variables: Sequence[Variable],
        *,
        initial: Operation | None = None,
        model_variables: Operation | None = None,
    ) -> Training:
        """The finished graph. A step ends with the op ``last``.

        ``left`` is a tensor that says whether any worker has left. ``variables`` are
        the variables on the parameter servers. ``initial`` and ``model_variables`` are
        the ops for ``Training.sync_initial`` and ``Training.sync_model_variables``.
        """
        with tf1.device(self.setter(self.cpu)):
            any_left, set_flag = departure_flag(left, self.cpu)
        session_manager.guard(self.workers)
        departure = self.barriers.departure()
        return Training(
            train_op=tf1.group(last, set_flag, name="train_op"),
            loss=mean_loss(losses, self.cpu),
            global_step=self._global_step,
            barriers=len(self.barriers),
            hook=TrainingHook(left=any_left, departure=departure, initial=initial),
            sync_initial=initial,
            sync_model_variables=model_variables,
            bytes_held=self._placed.bytes_held,
            masters=tuple(variables),
        )
