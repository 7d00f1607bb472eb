"""Barriers between workers, built from queues on the parameter servers.

Each worker has a queue there. To pass, it puts a token into every other worker's queue
and takes as many tokens out of its own queue as there are other workers. When it passes
for the k-th time, it has received k tokens from each of them. So no worker is ever more
than one step ahead.

A token says whether its sender has left for good; then no worker waits for it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfcluster.runtime.tensor_types import Operation, Tensor
from tfcluster.runtime.tf1.cluster_members import Workers

tf1 = tf.compat.v1

_TOKENS_A_WORKER = 4
"""The most tokens of one sender in a queue: one for each of two steps, and one for its
departure."""


@dataclass(frozen=True, slots=True)
class Barrier:
    """A barrier; later ops should depend on its ``op``."""

    op: Operation
    left: Tensor
    """A bool tensor: whether any other worker has left."""


class Barriers:
    """The barriers of one graph. They are spread over the ps tasks in turn.

    All workers must create the same barriers in the same order. ``scope`` separates
    them from the barriers of another graph in the same run. Follows
    ``_add_sync_queues_and_barrier`` of tensorpack/graph_builder/distributed.py; the
    token for a departure is our own addition.
    """

    def __init__(self, workers: Workers, scope: str = "") -> None:
        self._workers = workers
        self.scope = scope
        self._queues: dict[str, list[tf.queue.FIFOQueue]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def after(self, name: str, dependencies: Sequence[Operation | Tensor]) -> Barrier:
        """A barrier that a worker reaches when ``dependencies`` are done.

        It can be run again in every step. ``name`` identifies it in the whole cluster:
        equal names denote the same barrier, in any session. Raises ValueError if this
        graph already has a barrier of that name, and ContextError if there is no
        parameter server.
        """
        if name in self._queues:
            raise ValueError(f"this graph already has a barrier {name!r}")
        workers, others = self._workers, self._workers.num_worker - 1
        if not others:
            self._queues[name] = []
            with tf1.control_dependencies(dependencies):
                return Barrier(tf1.no_op(name=name), tf1.constant(False))
        # Outside the caller's control dependencies: the op may be run without them.
        with tf1.control_dependencies(None), tf1.device(self._next_device()):
            queues = [self._queue(name, rank) for rank in range(workers.num_worker)]
        self._queues[name] = queues
        with tf1.control_dependencies(dependencies):
            sent = self._put(queues, leaving=False)
            tokens = queues[workers.rank].dequeue_many(others)
        with tf1.device(workers.device):
            left = tf1.reduce_any(tokens)
        return Barrier(tf1.group(*sent, tokens, name=name), left)

    def departure(self) -> Operation:
        """An op that tells all other workers that this one has left for good.

        The others pass each barrier once more and then know that this worker has left.
        """
        puts = [
            put
            for queues in self._queues.values()
            for put in self._put(queues, leaving=True)
        ]
        departure: Operation = tf1.group(*puts, name="departure")
        return departure

    def _next_device(self) -> str:
        devices = self._workers.ps_devices
        return devices[len(self._queues) % len(devices)]

    def _queue(self, name: str, rank: int) -> tf.queue.FIFOQueue:
        """The queue of the worker with this rank; it is shared by all sessions."""
        return tf1.FIFOQueue(
            _TOKENS_A_WORKER * self._workers.num_worker,
            [tf.bool],
            shapes=[[]],
            shared_name=f"{name}/{self.scope}/{rank}",
        )

    def _put(
        self, queues: Sequence[tf.queue.FIFOQueue], *, leaving: bool
    ) -> list[Operation]:
        return [
            queue.enqueue(tf1.constant(leaving))
            for rank, queue in enumerate(queues)
            if rank != self._workers.rank
        ]
