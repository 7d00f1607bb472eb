"""Workers wait for each other, by way of queues on the parameter servers.

Each has a queue there. To pass, a worker puts a token into the queue of every other one
and takes as many out of its own as there are others. Whoever passes the k-th time has k
tokens of each other worker, so nobody is ever more than one step ahead.

A token says whether its sender has left for good, so that nobody waits for it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfcluster.runtime.tf1.cluster_members import Workers

tf1 = tf.compat.v1

_TOKENS_A_WORKER = 4
"""At most so many of one sender are in a queue: two steps, and its farewell."""


@dataclass(frozen=True, slots=True)
class Barrier:
    """``op`` is what the next thing depends on."""

    op: Any
    left: Any
    """A bool tensor: whether any other worker has left."""


class Barriers:
    """The barriers of one graph: the n-th has its queues on the n-th ps, in turn.

    All workers have to make the same ones in the same order. ``scope`` tells them from
    those of another graph of the same run.
    """

    def __init__(self, workers: Workers, scope: str = "") -> None:
        self._workers = workers
        self.scope = scope
        self._made: dict[str, list[Any]] = {}

    def __len__(self) -> int:
        return len(self._made)

    def after(self, name: str, dependencies: Sequence[Any]) -> Barrier:
        """A barrier that a worker comes to when ``dependencies`` are done.

        It can be run again at every step. ``name`` is known to the whole cluster: what
        has the same one, in whichever session, is the same barrier. Raises ValueError
        where this graph has it already.
        """
        if name in self._made:
            raise ValueError(f"this graph already has a barrier {name!r}")
        workers, others = self._workers, self._workers.num_worker - 1
        if not others:
            self._made[name] = []
            with tf1.control_dependencies(dependencies):
                return Barrier(tf1.no_op(name=name), tf1.constant(False))
        # Not within what the caller has open: the op may be run without it.
        with tf1.control_dependencies(None), tf1.device(self._next_device()):
            queues = [self._queue(name, rank) for rank in range(workers.num_worker)]
        self._made[name] = queues
        with tf1.control_dependencies(dependencies):
            here = self._put(queues, leaving=False)
            tokens = queues[workers.rank].dequeue_many(others)
        with tf1.device(workers.device):
            left = tf1.reduce_any(tokens)
        return Barrier(tf1.group(*here, tokens, name=name), left)

    def farewell(self) -> Any:
        """An op that tells all others that this worker has left for good.

        They pass each of the barriers once more, and then know.
        """
        puts = [
            put
            for queues in self._made.values()
            for put in self._put(queues, leaving=True)
        ]
        return tf1.group(*puts, name="farewell")

    def _next_device(self) -> str:
        devices = self._workers.ps_devices
        return devices[len(self._made) % len(devices)]

    def _queue(self, name: str, rank: int) -> Any:
        """That of the worker of this rank: the same one in all sessions."""
        return tf1.FIFOQueue(
            _TOKENS_A_WORKER * self._workers.num_worker,
            [tf.bool],
            shapes=[[]],
            shared_name=f"{name}/{self.scope}/{rank}",
        )

    def _put(self, queues: Sequence[Any], *, leaving: bool) -> list[Any]:
        return [
            queue.enqueue(tf1.constant(leaving))
            for rank, queue in enumerate(queues)
            if rank != self._workers.rank
        ]
