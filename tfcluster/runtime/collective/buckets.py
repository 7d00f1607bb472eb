"""Which tensors are exchanged together. Pure.

What comes out depends only on the tensors' order, dtypes and sizes and on the size of a
bucket: it is the same on all ranks that agree on these, however often and in whatever
order they trace or ask.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

MEGABYTE = 1 << 20
DEFAULT_BYTES = 25 * MEGABYTE


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor, as far as it matters here."""

    dtype: str
    nbytes: int | None
    """None: its shape is not known."""
    name: str = ""


Bucket = tuple[int, ...]
"""Positions of the tensors that are in it; all have one dtype."""


def by_size(items: Sequence[Item], bucket_bytes: int) -> list[Bucket]:
    """Each tensor's position in exactly one bucket; their order is kept.

    A bucket takes tensors of its dtype until it *exceeds* ``bucket_bytes``: there are
    few, and all but the last of a dtype are at least so large. With ``bucket_bytes`` 0
    there is one for each dtype, as there is, with a RuntimeWarning, where the size of a
    tensor is not known.
    """
    unknown = [item for item in items if item.nbytes is None]
    if unknown and bucket_bytes:
        warnings.warn(
            f"not divided into buckets: the shape of {unknown[0].name or 'a tensor'} "
            "is not known",
            RuntimeWarning,
            stacklevel=2,
        )
    whole = bool(unknown) or bucket_bytes == 0
    buckets: list[list[int]] = []
    current: dict[str, tuple[list[int], int]] = {}
    for position, item in enumerate(items):
        members, size = current.get(item.dtype, ([], 0))
        if not members or (size > bucket_bytes and not whole):
            members, size = [], 0
            buckets.append(members)
        members.append(position)
        current[item.dtype] = members, size + (item.nbytes or 0)
    return [tuple(members) for members in buckets]
