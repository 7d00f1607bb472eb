"""The hosts that a plan can assume before a scheduler or a host was asked. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tfcluster.model import Allocation, Description, Host, HostEntry


def expected(description: Description) -> Allocation:
    """The described hosts, or ``<node 1>`` and so on where a scheduler chooses."""
    if description.backend == "ssh":
        return Allocation(hosts=listed_hosts(description.hosts))
    count = len(description.task_ids())
    if description.backend == "slurm":
        slurm = description.slurm
        each = slurm.tasks_per_node
        nodes = slurm.nodes or (-(-count // each) if each else 1)
        return _placeholders(nodes, each, _numbered(slurm.gpus_per_node))
    if description.backend == "sge":
        return _placeholders(1, description.sge.slots, None)
    return Allocation(hosts=(Host(name="localhost", address="127.0.0.1"),))


def listed_hosts(entries: Sequence[HostEntry]) -> tuple[Host, ...]:
    """The hosts of the list, in its order."""
    return tuple(
        Host(
            name=name,
            address=entry.address or name,
            slots=entry.slots,
            gpus=_numbered(entry.gpus),
            python=entry.python,
        )
        for name, entry in zip(host_names(entries), entries, strict=True)
    )


def host_names(entries: Sequence[HostEntry]) -> tuple[str, ...]:
    """What each host is called: by its name, and port where two have the same."""
    count = Counter(entry.host for entry in entries)
    return tuple(
        f"{entry.host}:{entry.port or 22}" if count[entry.host] > 1 else entry.host
        for entry in entries
    )


def _numbered(count: int | None) -> tuple[str, ...] | None:
    return None if count is None else tuple(map(str, range(count)))


def _placeholders(
    count: int, slots: int | None, gpus: tuple[str, ...] | None
) -> Allocation:
    names = [f"<node {number}>" for number in range(1, count + 1)]
    return Allocation(
        hosts=tuple(Host(name=n, address=n, slots=slots, gpus=gpus) for n in names),
        provisional=True,
    )
