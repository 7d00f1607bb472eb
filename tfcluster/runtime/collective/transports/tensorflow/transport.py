"""Sends large vectors through TensorFlow's collective ops, other data over ``host``.

The ops run eagerly on numpy arrays. After the ranks' rendezvous, TensorFlow starts its
server on the port that they used for it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective.transports.base import Array, ReduceOp
from tfcluster.runtime.collective.transports.hierarchical import HostTransport
from tfcluster.runtime.collective.transports.multiplexed_sockets import PeerSockets
from tfcluster.runtime.collective.transports.tensorflow import lazy_server, ops
from tfcluster.runtime.collective.transports.tensorflow.collective_keys import (
    GROUP_KEYS,
    instance_key,
)
from tfcluster.runtime.collective.transports.tensorflow.failures import translated
from tfcluster.runtime.collective.transports.tensorflow.gpus import (
    identities,
    obstacle,
)
from tfcluster.runtime.collective.transports.tensorflow.lazy_server import Task
from tfcluster.runtime.errors import CollectiveError
from tfcluster.runtime.net.rendezvous import Member
from tfcluster.runtime.tensors import tensor_of

_DIRECT_BYTES = 1 << 20
"""Up to this size ``host`` is many times faster."""


class TensorFlowTransport(HostTransport):
    """A ``HostTransport`` that sends large vectors by TensorFlow's ops.

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
        task: Task,
        *,
        joining: Callable[[str], AbstractContextManager[None]],
        timeout_s: float,
        unless: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(me, addresses, timeout_s=timeout_s)
        self._task = task
        self._watched = joining
        self._device_groups: ops.Groups | None = None
        self._joining = threading.RLock()
        self._has_joined = False
        self.carried_bytes = 0
        """The total number of bytes passed to TensorFlow's ops."""
        self._unless = unless
        self._uses_ops: bool | None = None if unless else True
        if unless is None or not lazy_server.is_running():
            lazy_server.arrange(task, self._join)

    @property
    def uses_ops(self) -> bool:
        """Whether TensorFlow's ops carry anything.

        With ``unless``, the ranks agree on this when they connect. Then the first call
        is a collective operation, unless TensorFlow has executed an op. Raises what
        ``HostTransport.allgather`` raises.
        """
        if self._uses_ops is None:
            self._join()
        return bool(self._uses_ops)

    @property
    def several_hosts(self) -> bool:
        return super().several_hosts and not self.uses_ops

    @property
    def devices(self) -> ops.Devices:
        """The devices of the ops. The first call is a collective operation.

        Raises what ``HostTransport.allgather`` raises.
        """
        return self.groups.large

    @property
    def groups(self) -> ops.Groups:
        """The groups of devices of ops in graphs; see ``devices``."""
        if self._device_groups is None:
            self._device_groups = self._agreed_groups()
        return self._device_groups

    def gathered_order(self) -> tuple[int, ...]:
        """The ranks in the order in which the ops gather their tensors.

        A collective operation; raises what ``HostTransport.allgather`` raises.
        """
        own = np.array([self.rank], np.int64)
        key, cpus = instance_key(["order of the ranks"]), self.groups.cpus
        found = self._run(lambda: ops.all_gather(own, cpus, key), 0)
        return tuple(int(rank) for rank in found)

    def wait_no_longer(self, waited_s: float) -> None:
        """Abort the ops, which have waited this long; see ``lazy_server.abort``."""
        waited = f"rank {self.rank} has waited {waited_s:.0f} s"
        lazy_server.abort(waited, tf.errors.DEADLINE_EXCEEDED)

    def allreduce(
        self, buffer: Array, op: ReduceOp, source: Array | None = None
    ) -> None:
        """Above 1 MiB uses TensorFlow's ops, if they know the dtype.

        Not for MIN and MAX of floats: numpy and TensorFlow treat NaN differently.
        """
        dtype = tf.as_dtype(buffer.dtype)
        is_known = dtype in ops.DTYPES and buffer.dtype.isnative
        if dtype.is_floating and op in (ReduceOp.MIN, ReduceOp.MAX):
            is_known = False
        if buffer.nbytes <= _DIRECT_BYTES or not is_known or not self.uses_ops:
            super().allreduce(buffer, op, source)
            return
        if source is not None:
            buffer[:] = source
        # Keys repeat, which is safe: no rank starts an all-reduce before all ranks have
        # finished the previous one.
        key = instance_key(("allreduce", op.value, dtype.name, buffer.size))
        devices = self.devices
        buffer[:] = self._run(
            # Not copied: nobody writes to the buffer meanwhile.
            lambda: ops.all_reduce(tensor_of(buffer, dtype), devices, key, op),
            buffer.nbytes,
        )

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
        said = [json.loads(other) for other in self.allgather(ours.encode())]
        late_ranks = [rank for rank, (late, _) in enumerate(said) if late]
        why = obstacle([gpus for _, gpus in said])
        if late_ranks:
            why = f"rank {late_ranks[0]} used TensorFlow before init()"
        if why and self._unless is not None:
            self._unless(why)
        return not why

    def _agreed_groups(self) -> ops.Groups:
        """One device of each rank: GPUs if every rank has its own, else CPUs."""
        lazy_server.started()
        gpus = visible_gpus() if tf.config.list_logical_devices("GPU") else ()
        # This is also a barrier: after it, every rank's server is running.
        said = self.allgather(json.dumps([self._task.name, gpus]).encode())
        shared = obstacle([json.loads(other)[1] for other in said])
        cpus = self._group("CPU", ops.RING)
        return ops.Groups(cpus if shared else self._group("GPU", ops.NCCL), cpus)

    def _group(self, kind: str, hint: str) -> ops.Devices:
        key = GROUP_KEYS[("CPU", "GPU").index(kind)]
        own = f"{self._task.ranks[self.rank]}/device:{kind}:0"
        return ops.Devices(key, self.size, own, hint)

    def _run(self, act: Callable[[], Any], count: int) -> Array:
        self.carried_bytes += count
        # Not the ops' own timeout: it ends an op while bytes are still in transit, and
        # TensorFlow then uses memory that it has already freed.
        limit = threading.Timer(self.timeout_s, self._give_up)
        limit.daemon = True
        with self.elsewhere(count):
            limit.start()
            try:
                result: Array = act().numpy()
            except tf.errors.OpError as error:
                raise self.error_of(error) from error
            finally:
                limit.cancel()
        return result

    def _give_up(self) -> None:
        self.wait_no_longer(self.timeout_s)

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
    """The GPUs that TensorFlow uses in this process; see ``gpus.identities``.

    Does not start TensorFlow: GPUs can still be configured, and hidden from it.
    """
    devices = tf.config.get_visible_devices("GPU")
    numbers = [int(device.name.rpartition(":")[2]) for device in devices]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return identities(socket.gethostname(), numbers, visible)
