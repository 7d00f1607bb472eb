"""Converts TensorFlow's forms of a cluster: dict, ClusterSpec, ClusterDef.

Does not import TensorFlow, because it recognises the objects by their attributes.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfcluster.runtime.errors import ContextError

OLD_NAMES = {"master": "chief"}

Jobs = dict[str, dict[int, str]]


def jobs_of(cluster: object) -> Jobs:
    """Addresses by job and index, from any of these forms or from a ServerDef.

    In a dict, a job has a list of addresses, one address, or addresses by index.
    Raises ContextError for anything else.
    """
    if hasattr(cluster, "cluster") and hasattr(cluster, "job_name"):
        cluster = cluster.cluster  # of a ServerDef
    if hasattr(cluster, "as_cluster_def"):
        cluster = cluster.as_cluster_def()
    if hasattr(cluster, "job") and not isinstance(cluster, Mapping):
        jobs = {job.name: dict(job.tasks) for job in cluster.job}
    elif isinstance(cluster, Mapping):
        jobs = {str(job): _by_index(job, tasks) for job, tasks in cluster.items()}
    else:
        kind = type(cluster).__name__
        raise ContextError(
            f"a cluster is a dict, a ClusterSpec or a ClusterDef, not a {kind}"
        )
    return {OLD_NAMES.get(job, job): tasks for job, tasks in jobs.items()}


def _by_index(job: object, tasks: object) -> dict[int, str]:
    if isinstance(tasks, str):
        tasks = [tasks]
    if isinstance(tasks, Mapping):
        numbered = list(tasks.items())
    elif isinstance(tasks, list | tuple):
        numbered = list(enumerate(tasks))
    else:
        raise ContextError(f"job {job!r} is not a list of addresses")
    if not all(isinstance(i, int) and isinstance(a, str) for i, a in numbered):
        raise ContextError(f"job {job!r} has an entry that is not an address")
    return dict(numbered)
