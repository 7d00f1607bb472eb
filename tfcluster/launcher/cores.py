"""Divides the cores of hosts among the ranks there. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from tfcluster.compose import TaskSpec
from tfcluster.console.text import plural
from tfcluster.protocol.wire import INTRA_OP_THREADS


def threads_env(
    specs: Iterable[TaskSpec], cpus: Mapping[str, int]
) -> dict[str, str | None]:
    """The number of threads in which each rank computes an operation.

    All ranks have the same number, because the bits of a product depend on it, and all
    ranks must have the same bits. Empty if each rank has a host to itself, or if the
    cores of a host are unknown.
    """
    shares = [
        cpus.get(spec.place.host.name, 0) / spec.place.local_size
        for spec in specs
        if spec.place.rank is not None
    ]
    alone = all(spec.place.local_size < 2 for spec in specs)
    if alone or not shares or not all(shares):
        return {}
    return {INTRA_OP_THREADS: str(max(1, int(min(shares))))}


def crowding(specs: Iterable[TaskSpec], cpus: Mapping[str, int]) -> str | None:
    """A note if hosts have more ranks than cores; None if none has."""
    ranks = Counter(
        (spec.place.host.name, spec.place.local_size)
        for spec in specs
        if spec.place.rank is not None
    )
    crowded = [(host, size) for host, size in ranks if 0 < cpus.get(host, 0) < size]
    if not crowded:
        return None
    host, size = crowded[0]
    others = plural(len(crowded) - 1, "other host")
    more = f", and alike on {others}" if crowded[1:] else ""
    cores = plural(cpus[host], "core")
    return (
        f"note: {plural(size, 'rank')} share {cores} of {host}{more}: each has "
        "one thread for an operation, and more ranks than cores are not faster"
    )
