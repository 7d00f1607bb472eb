"""Turns the entries of ``hosts:`` into the Hosts of an allocation. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tfcluster.model import Host, HostEntry


def listed_hosts(entries: Sequence[HostEntry]) -> tuple[Host, ...]:
    """One Host per entry, in the order of the list."""
    return tuple(
        Host(
            name=name,
            address=entry.address,
            slots=entry.slots,
            gpus=numbered(entry.gpus),
            python=entry.python,
        )
        for name, entry in zip(host_names(entries), entries, strict=True)
    )


def host_names(entries: Sequence[HostEntry]) -> tuple[str, ...]:
    """A unique name per host: its name, with the port where two have the same name."""
    count = Counter(entry.host for entry in entries)
    return tuple(
        f"{entry.host}:{entry.port or 22}" if count[entry.host] > 1 else entry.host
        for entry in entries
    )


def numbered(count: int | None) -> tuple[str, ...] | None:
    """The devices 0, 1, ... of a host with ``count`` GPUs; None: unknown."""
    return None if count is None else tuple(map(str, range(count)))
