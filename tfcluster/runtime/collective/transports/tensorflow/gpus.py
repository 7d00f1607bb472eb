"""Whether the ranks can use NCCL, from what they say about their GPUs. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def own_each(gpus: Sequence[str | None]) -> bool:
    """Whether every rank has a GPU that no other rank has.

    ``gpus[r]`` identifies the first GPU of rank r in the whole cluster; None: it has
    none.
    """
    return None not in gpus and len(set(gpus)) == len(gpus)
