"""Whether each rank has a GPU to itself, from what the ranks say. Pure.

Only then can NCCL reduce gradients: it refuses two ranks on one GPU.
"""

from __future__ import annotations

from collections.abc import Sequence


def identities(
    host: str, numbers: Sequence[int], visible: str | None
) -> tuple[str, ...]:
    """The GPUs that TensorFlow uses in a process, each by a name in the whole cluster.

    ``numbers`` are TensorFlow's own of these GPUs; ``visible`` is the process's
    CUDA_VISIBLE_DEVICES, which lists the GPUs that have a number; None if it is not
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
    """Why not every rank has a GPU to itself; empty if each has one.

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
