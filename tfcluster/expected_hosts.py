"""The hosts that a plan assumes before any scheduler or host has been asked. Pure."""

from __future__ import annotations

from tfcluster.host_list import listed_hosts, numbered
from tfcluster.model import Allocation, Description, Host
from tfcluster.scheduler_request import sge_slots, slurm_request


def expected(description: Description) -> Allocation:
    """The configured hosts, or ``<node 1>`` and so on if a scheduler chooses them."""
    if description.backend == "ssh":
        return Allocation(hosts=listed_hosts(description.hosts))
    wanted = sum((g.gpus or 0) * g.count for g in description.tasks.values())
    if description.backend == "slurm":
        asked = slurm_request(description)
        gpus = numbered(asked.gpus_per_node or wanted or None)
        return _placeholders(asked.nodes or 1, asked.tasks_per_node, gpus)
    if description.backend == "sge":
        return _placeholders(1, sge_slots(description), numbered(wanted or None))
    return Allocation(hosts=(Host(name="localhost", address="127.0.0.1"),))


def _placeholders(
    count: int, slots: int | None, gpus: tuple[str, ...] | None
) -> Allocation:
    names = [f"<node {number}>" for number in range(1, count + 1)]
    return Allocation(
        hosts=tuple(Host(name=n, slots=slots, gpus=gpus) for n in names),
    )
