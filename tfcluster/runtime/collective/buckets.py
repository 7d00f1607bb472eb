"""Gradient bucketing: chooses the tensors to pack into one collective operation. Pure.

The result depends only on the order, dtypes and sizes of the tensors and on the bucket
size. So ranks that agree on these get the same buckets, however often and in whatever
order they trace their steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

MEGABYTE = 1 << 20
DEFAULT_BYTES = 25 * MEGABYTE


@dataclass(frozen=True, slots=True)
class Item:
    """The properties of a tensor that bucketing needs."""

    dtype: str
    nbytes: int | None
    """None if its shape is not known."""
    name: str = ""


Bucket = tuple[int, ...]
"""The positions of the tensors in the bucket; all have one dtype."""


def by_size(items: Sequence[Item], bucket_bytes: int) -> list[Bucket]:
    """Put each tensor's position into exactly one bucket, keeping their order.

    A bucket takes tensors of its dtype until it *exceeds* ``bucket_bytes`` bytes, so
    all buckets but the last of each dtype are larger than that. With ``bucket_bytes`` 0
    there is one bucket per dtype. If the size of a tensor is unknown, the result is the
    same, with a RuntimeWarning. Follows PyTorch's ``compute_bucket_assignment_by_size``
    (torch/csrc/distributed/c10d/reducer.cpp; Li et al., arXiv:2006.15704), which closes
    a bucket once it has *reached* the limit.
    """
    unknown = [item for item in items if item.nbytes is None]
    if unknown and bucket_bytes:
        warnings.warn(
            f"gradients are not bucketed: the shape of {unknown[0].name or 'a tensor'} "
            "is unknown",
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
