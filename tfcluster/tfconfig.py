"""TF_CONFIG, ClusterSpec and device filters, by TensorFlow's rules. Pure.

The cluster's JSON, which all tasks share, is built once for any number of tasks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tfcluster.errors import StartError
from tfcluster.light_dataclasses import dataclass
from tfcluster.model import Strategy
from tfcluster.task_id import TaskId

# execve(2): an environment string, with its final NUL, is limited to 32 pages.
MAX_ENV_STRING_BYTES = 131_072

_IN_CLUSTER = ("chief", "worker", "ps")
"""The task types of TensorFlow's cluster, to which evaluator and data do not belong."""

_BETWEEN_GRAPHS = (Strategy.PARAMETER_SERVER, Strategy.REPLICATED, Strategy.NONE)
"""Strategies under which each worker has its own graph. With ``none``, the script
decides, and TensorFlow's own strategies set their own filters."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The ``cluster`` part of TF_CONFIG: addresses by job, as data and as JSON."""

    jobs: Mapping[str, tuple[str, ...]]
    text: str

    def tf_config(self, task: TaskId) -> str:
        """The TF_CONFIG of one task, as JSON."""
        return (
            f'{{"cluster":{self.text},'
            f'"task":{{"type":"{task.type}","index":{task.index}}}}}'
        )

    def require_fit(self, tasks: Sequence[TaskId]) -> None:
        """Raise StartError if a task's TF_CONFIG is too long for the kernel."""
        longest = max(len(f"TF_CONFIG={self.tf_config(task)}") + 1 for task in tasks)
        if longest > MAX_ENV_STRING_BYTES:
            raise StartError(
                f"TF_CONFIG would be {longest} bytes long, but the kernel takes at "
                f"most {MAX_ENV_STRING_BYTES} in one environment variable",
                hint="use fewer tasks or shorter host names (or IP addresses)",
            )


def cluster(addresses: Sequence[tuple[TaskId, str]]) -> Cluster:
    """The cluster of these tasks; ``addresses`` are ``host:port`` in listing order."""
    jobs: dict[str, list[str]] = {}
    for task, address in addresses:
        if task.type in _IN_CLUSTER:
            jobs.setdefault(task.type, []).append(address)
    text = json.dumps(jobs, separators=(",", ":"))
    return Cluster({kind: tuple(found) for kind, found in jobs.items()}, text)


def device_filters(task: TaskId, strategy: Strategy, *, has_ps: bool) -> list[str]:
    """The device filters of a task's server or session; empty: it sees all devices.

    Workers that share parameter servers do not need to see each other, and a missing
    worker cannot hold up a worker that does not see it.
    """
    independent = strategy in _BETWEEN_GRAPHS
    if not has_ps or not independent or not task.ranked:
        return []
    return ["/job:ps", f"/job:{task.type}/task:{task.index}"]
