"""The hosts that a plan assumes before any scheduler or host has been asked. Pure."""

from __future__ import annotations

from tfcluster.host_list import listed_hosts, numbered
from tfcluster.model import Allocation, Description, Host


def expected(description: Description) -> Allocation:
    """The configured hosts, or ``<node 1>`` and so on if a scheduler chooses them."""
    if description.backend == "ssh":
        return Allocation(hosts=listed_hosts(description.hosts))
    count = len(description.task_ids())
    if description.backend == "slurm":
        slurm = description.slurm
        each = slurm.tasks_per_node
        nodes = slurm.nodes or (-(-count // each) if each else 1)
        return _placeholders(nodes, each, numbered(slurm.gpus_per_node))
    if description.backend == "sge":
        return _placeholders(1, description.sge.slots, None)
    return Allocation(hosts=(Host(name="localhost", address="127.0.0.1"),))


def _placeholders(
    count: int, slots: int | None, gpus: tuple[str, ...] | None
) -> Allocation:
    names = [f"<node {number}>" for number in range(1, count + 1)]
    return Allocation(
        hosts=tuple(Host(name=n, slots=slots, gpus=gpus) for n in names),
    )
