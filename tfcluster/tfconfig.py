"""TF_CONFIG, ClusterSpec and device filters by TensorFlow's own rules. Pure.

What all tasks share (the cluster, as JSON) is made once, however many tasks there are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfcluster.errors import StartError
from tfcluster.model import Strategy, TaskId

# execve(2): one string of the environment, its end included, is limited to 32 pages.
MAX_ENV_STRING_BYTES = 131_072

_IN_CLUSTER = ("chief", "worker", "ps")
"""TensorFlow: the evaluator is not part of the cluster; data tasks are not its jobs."""

_BETWEEN_GRAPHS = (Strategy.PARAMETER_SERVER, Strategy.REPLICATED, Strategy.NONE)
"""Each worker has a graph of its own; with ``none`` the script asks for what it needs,
and TensorFlow's own strategies set filters of their own."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The ``cluster`` part of TF_CONFIG: addresses by job, and its JSON text."""

    jobs: Mapping[str, tuple[str, ...]]
    text: str

    def tf_config(self, task: TaskId) -> str:
        """TF_CONFIG of one task."""
        return (
            f'{{"cluster":{self.text},'
            f'"task":{{"type":"{task.type}","index":{task.index}}}}}'
        )

    def require_fit(self, tasks: Sequence[TaskId]) -> None:
        """Raise StartError where TF_CONFIG would be too long for the kernel."""
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
    """The devices that a task's server or session sees; empty: all of them.

    Between workers that share parameter servers nobody needs to see the other workers,
    and whoever does not see them cannot be held up by one that is missing.
    """
    independent = strategy in _BETWEEN_GRAPHS
    if not has_ps or not independent or not task.ranked:
        return []
    return ["/job:ps", f"/job:{task.type}/task:{task.index}"]
