"""Prepares TensorFlow's collective ops, which programs exchange by.

What Python exchanges goes over ``host``. After the ranks' rendezvous, TensorFlow starts
its server on the port that they used for it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import tensorflow as tf

from tfcluster.runtime.collective.transports.hierarchical import HostTransport
from tfcluster.runtime.collective.transports.multiplexed_sockets import PeerSockets
from tfcluster.runtime.collective.transports.tensorflow import lazy_server
from tfcluster.runtime.collective.transports.tensorflow.devices import (
    GROUP_KEYS,
    NCCL,
    RING,
    DeviceGroup,
    Groups,
    identities,
    instance_key,
    obstacle,
)
from tfcluster.runtime.collective.transports.tensorflow.failures import translated
from tfcluster.runtime.collective.transports.tensorflow.lazy_server import ClusterTask
from tfcluster.runtime.errors import CollectiveError
from tfcluster.runtime.net.rendezvous import Member


class TensorFlowTransport(HostTransport):
    """A ``HostTransport`` of ranks whose programs exchange by TensorFlow's ops.

    The context manager ``joining`` is entered while the ranks connect; its argument is
    the reason for connecting. With ``unless``, the ranks agree on whether each of them
    has its own GPU. If not, everything is as with ``host``, no server starts, and
    ``unless`` is called with the reason. Without ``unless``, raises CollectiveError if
    TensorFlow has already executed an op. Follows the start of
    ``MultiWorkerMirroredStrategy``
    (tensorflow/python/distribute/collective_all_reduce_strategy.py).
    """

    def __init__(
        self,
        me: Member,
        addresses: Sequence[str],
        task: ClusterTask,
        *,
        joining: Callable[[str], AbstractContextManager[None]],
        timeout_s: float,
        unless: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(me, addresses, timeout_s=timeout_s)
        self._task = task
        self._watched = joining
        self._device_groups: Groups | None = None
        self._joining = threading.RLock()
        self._has_joined = False
        self._unless = unless
        self._uses_ops: bool | None = None if unless else True
        if unless is None or not lazy_server.is_running():
            lazy_server.arrange(task, self._join)

    @property
    def uses_ops(self) -> bool:
        """Whether programs exchange by TensorFlow's ops.

        With ``unless``, the ranks agree on this when they connect. Then the first call
        is a collective operation, unless TensorFlow has executed an op. Raises what
        ``HostTransport.allgather`` raises.
        """
        if self._uses_ops is None:
            self._join()
        return bool(self._uses_ops)

    @property
    def groups(self) -> Groups:
        """The groups of devices of the ops. The first call is a collective operation.

        Raises what ``HostTransport.allgather`` raises.
        """
        if self._device_groups is None:
            self._device_groups = self._agreed_groups()
        return self._device_groups

    def gathered_order(self) -> tuple[int, ...]:
        """The ranks in the order in which the ops gather their tensors.

        A collective operation; raises what ``HostTransport.allgather`` raises.
        """
        cpus = self.groups.cpus
        # Not the op's own timeout: it ends an op while bytes are still in transit, and
        # TensorFlow then uses memory that it has already freed.
        limit = threading.Timer(
            self.timeout_s, lambda: self.wait_no_longer(self.timeout_s)
        )
        limit.daemon = True
        with self.elsewhere(0), tf.device(cpus.own):
            limit.start()
            try:
                ranks = tf.raw_ops.CollectiveGatherV2(
                    input=tf.constant([self.rank]),
                    group_size=cpus.size,
                    group_key=cpus.key,
                    instance_key=instance_key(["order of the ranks"]),
                    ordering_token=[],
                    communication_hint=cpus.hint,
                ).numpy()
            except tf.errors.OpError as error:
                raise self.error_of(error) from error
            finally:
                limit.cancel()
        return tuple(int(rank) for rank in ranks)

    def wait_no_longer(self, waited_s: float) -> None:
        """Abort the ops, which have waited this long; see ``lazy_server.abort``."""
        waited = f"rank {self.rank} has waited {waited_s:.0f} s"
        lazy_server.abort(waited, tf.errors.DEADLINE_EXCEEDED)

    def interrupt(self) -> None:
        """See ``HostTransport``; TensorFlow runs no collective op after that."""
        super().interrupt()
        # Abort even if this rank is not in an op: others may wait for it in an op, and
        # their own abort misses an op that has only just begun to receive.
        if self._device_groups is not None:
            lazy_server.abort(f"rank {self.rank} was interrupted")

    def connected(self) -> PeerSockets:
        self._join()
        return super().connected()

    def _join(self) -> bool:
        """Connect, unless connected; return ``uses_ops``."""
        # The program's first op may run in another thread than the first exchange.
        with self._joining:
            if not self._has_joined:
                self._has_joined = True  # The ranks exchange data below.
                try:
                    with self._watched("TensorFlow's first op"):
                        super().connected()
                        if self._uses_ops is None:
                            self._uses_ops = self._agreed_on_ops()
                except BaseException:
                    self._has_joined = False
                    raise
            return bool(self._uses_ops)

    def _agreed_on_ops(self) -> bool:
        """Whether each rank has its own GPU, and can still start a server."""
        late = lazy_server.is_running()
        ours = json.dumps([late, () if late else visible_gpus()])
        answers = [json.loads(other) for other in self.allgather(ours.encode())]
        late_ranks = [rank for rank, (late, _) in enumerate(answers) if late]
        why = obstacle([gpus for _, gpus in answers])
        if late_ranks:
            why = f"rank {late_ranks[0]} used TensorFlow before init()"
        if why and self._unless is not None:
            self._unless(why)
        return not why

    def _agreed_groups(self) -> Groups:
        """One device of each rank: GPUs if every rank has its own, else CPUs."""
        lazy_server.started()
        gpus = visible_gpus() if tf.config.list_logical_devices("GPU") else ()
        # This is also a barrier: after it, every rank's server is running.
        answers = self.allgather(json.dumps([self._task.name, gpus]).encode())
        shared = obstacle([json.loads(other)[1] for other in answers])
        cpus = self._group("CPU", RING)
        return Groups(cpus if shared else self._group("GPU", NCCL), cpus)

    def _group(self, kind: str, hint: str) -> DeviceGroup:
        key = GROUP_KEYS[("CPU", "GPU").index(kind)]
        own = f"{self._task.ranks[self.rank]}/device:{kind}:0"
        return DeviceGroup(key, self.size, own, hint)

    def error_of(self, error: tf.errors.OpError) -> CollectiveError:
        """The CollectiveError for an error of one of the ops."""
        status = _STATUSES.get(error.error_code, "UNKNOWN")
        return translated(status, error.message, self._task.ranks)


_STATUSES = {
    getattr(tf.errors, name): name
    for name in (
        "ABORTED",
        "CANCELLED",
        "DEADLINE_EXCEEDED",
        "INTERNAL",
        "INVALID_ARGUMENT",
        "UNAVAILABLE",
    )
}


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that TensorFlow uses in this process; see ``identities``.

    Does not start TensorFlow: GPUs can still be configured, and hidden from it.
    """
    devices = tf.config.get_visible_devices("GPU")
    numbers = [int(device.name.rpartition(":")[2]) for device in devices]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return identities(socket.gethostname(), numbers, visible)
