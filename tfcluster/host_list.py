"""The hosts that a description lists, as an allocation has them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tfcluster.model import Host, HostEntry


def listed_hosts(entries: Sequence[HostEntry]) -> tuple[Host, ...]:
    """The hosts of the list, in its order."""
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
    """What each host is called: by its name, and port where two have the same."""
    count = Counter(entry.host for entry in entries)
    return tuple(
        f"{entry.host}:{entry.port or 22}" if count[entry.host] > 1 else entry.host
        for entry in entries
    )


def numbered(count: int | None) -> tuple[str, ...] | None:
    """The devices 0, 1, ... of a host with ``count`` GPUs; None: unknown."""
    return None if count is None else tuple(map(str, range(count)))
