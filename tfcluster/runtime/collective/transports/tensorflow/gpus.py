"""Decides from the ranks' reports whether each rank has its own GPU. Pure.

Only in that case can NCCL reduce gradients: it refuses two ranks on one GPU.
"""

from __future__ import annotations

from collections.abc import Sequence


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

    ``gpus[r]`` are the identities of the GPUs of rank r.
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
