"""The tasks that train together in a TensorFlow 1 cluster, and this task's place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tensorflow as tf

from tfcluster.base.vocabulary import RANKED_TYPES
from tfcluster.runtime import process_group
from tfcluster.runtime.errors import ContextError
from tfcluster.runtime.tf1.cluster_formats import OLD_NAMES, jobs_of
from tfcluster.runtime.tf1_types import Server

tf1 = tf.compat.v1


@dataclass(frozen=True, slots=True)
class Workers:
    """The tasks that train, chief first, and their parameter servers.

    Raises ContextError if this task does not train, or is not in the cluster.
    """

    cluster: Mapping[str, tuple[str, ...]]
    """Addresses by job."""
    task_type: str
    task_index: int
    attempt: int = 0
    """How often this task was started before; the parameter servers did not restart."""

    def __post_init__(self) -> None:
        if self.task_type not in RANKED_TYPES:
            raise ContextError(
                f"{self.task_type}:{self.task_index} does not train: a graph is for "
                f"{' and '.join(RANKED_TYPES)} tasks"
            )
        if self.task_index >= len(self.cluster.get(self.task_type, ())):
            raise ContextError(
                f"the cluster has no {self.task_type}:{self.task_index}: it has "
                f"{ {job: len(addresses) for job, addresses in self.cluster.items()} }"
            )

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks' names in rank order: ``chief:0``, ``worker:0``, ..."""
        return tuple(
            f"{job}:{index}"
            for job in RANKED_TYPES
            for index in range(len(self.cluster.get(job, ())))
        )

    @property
    def num_worker(self) -> int:
        """The number of tasks that train, including the chief."""
        return len(self.tasks)

    @property
    def num_ps(self) -> int:
        """The number of parameter servers."""
        return len(self.cluster.get("ps", ()))

    @property
    def rank(self) -> int:
        """This task's position in ``tasks``."""
        return self.tasks.index(f"{self.task_type}:{self.task_index}")

    @property
    def is_chief(self) -> bool:
        """Whether this is the first of ``tasks``."""
        return self.rank == 0

    @property
    def device(self) -> str:
        """This task's device: ``/job:worker/task:1``."""
        return f"/job:{self.task_type}/task:{self.task_index}"

    @property
    def ps_devices(self) -> tuple[str, ...]:
        """The CPU of each ps task. Raises ContextError if there is none."""
        if not self.num_ps:
            raise ContextError(
                "the cluster has no parameter server: give it one with tasks.ps (or "
                "tfcluster launch --ps 1)"
            )
        return tuple(
            f"/job:ps/task:{index}/device:CPU:0" for index in range(self.num_ps)
        )


def workers(server: Server | tf.train.ServerDef | None = None) -> Workers:
    """The workers in TF_CONFIG, or in the cluster of ``server`` if given.

    ``server`` may be a ``tf.distribute.Server`` or a ``ServerDef``. Raises ContextError
    if this task does not train, is not in the cluster, or if TF_CONFIG is invalid.
    """
    if server is None:
        context = process_group.context()
        return Workers(
            dict(context.cluster),
            context.task_type,
            context.task_index,
            context.attempt,
        )
    definition: tf.train.ServerDef = getattr(server, "server_def", server)
    job = definition.job_name
    return Workers(
        cluster_of(definition),
        OLD_NAMES.get(job, job),
        definition.task_index,
        process_group.context().attempt,
    )


def cluster_of(cluster: object) -> dict[str, tuple[str, ...]]:
    """Addresses by job, from one of the forms of ``jobs_of``."""
    return {
        job: tuple(tasks[index] for index in sorted(tasks))
        for job, tasks in jobs_of(cluster).items()
    }
