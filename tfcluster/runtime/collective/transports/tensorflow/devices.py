"""The devices of collective ops: groups with one device of each rank, and keys. Pure.

Group keys and instance keys identify collective ops. TensorFlow's own strategies count
theirs from 1 (groups) and 100 (instances). Ours come from separate ranges, so that both
work in one process.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

GROUP_KEYS = range(1 << 29, 1 << 30)
NAMED_KEYS = range(1 << 30, 1 << 31)
"""The range of ``instance_key``'s results; keys are signed 32-bit integers."""

RING = "ring"
NCCL = "nccl"
"""Communication hints. TensorFlow ignores hints in capitals, and uses a ring."""

SUBDIVISIONS = 4
"""Number of pieces of a long vector that a ring sends concurrently."""


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """The group of devices, as one of its members sees it."""

    key: int
    """The group's key, one of ``GROUP_KEYS``."""
    size: int
    own: str
    """The full name of this rank's device."""
    hint: str = RING
    """The method: a ring of gRPC connections, or NCCL between GPUs."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of devices of the ranks, as one of them sees them."""

    large: DeviceGroup
    """For floating-point numbers: GPUs if every rank has its own, else CPUs."""
    cpus: DeviceGroup
    """For all other data."""


def instance_key(words: Iterable[object]) -> int:
    """The key of the operation named by ``words``.

    The key is a hash, so equal words give equal keys in every process and at any time:
    a rank that retraces its step, or traces it earlier than others, still uses a
    matching key. A counter would not ensure this. Two descriptions share a key with a
    probability of about 1e-9.
    """
    digest = hashlib.sha256(json.dumps([*map(str, words)]).encode()).digest()
    return NAMED_KEYS[int.from_bytes(digest[:8], "big") % len(NAMED_KEYS)]


def identities(
    host: str, numbers: Sequence[int], visible: str | None
) -> tuple[str, ...]:
    """The GPUs that TensorFlow uses in a process, by names unique in the cluster.

    ``numbers`` are TensorFlow's numbers of these GPUs. ``visible`` is the process's
    CUDA_VISIBLE_DEVICES, which lists the GPUs that have a number, or None if it is not
    set.
    """
    if visible is None:
        return tuple(f"{host} {number}" for number in numbers)
    names = [name.strip() for name in visible.split(",")]
    return tuple(
        f"{host} {names[number] if number < len(names) else number}"
        for number in numbers
    )


def obstacle(gpus: Sequence[Sequence[str]]) -> str:
    """The reason why not every rank has its own GPU; empty if each has one.

    Only then can NCCL be used, which refuses two ranks on one GPU. ``gpus[r]`` are the
    identities of the GPUs of rank r.
    """
    owners: dict[str, int] = {}
    for rank, own in enumerate(gpus):
        if not own:
            return f"rank {rank} has no GPU that TensorFlow can use"
        for gpu in own:
            other = owners.setdefault(gpu, rank)
            if other != rank:
                host, _, name = gpu.rpartition(" ")
                return f"rank {other} and rank {rank} share GPU {name} of {host}"
    return ""
