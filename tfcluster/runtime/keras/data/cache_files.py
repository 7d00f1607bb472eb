"""Files that datasets write: each rank gets its own cache and snapshot files."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from tfcluster.runtime import tf_patches
from tfcluster.runtime.tensor_types import Dataset, Tensor

_File = str | os.PathLike[str] | Tensor | None
"""A path as ``tf.data`` takes it; a tensor is a scalar string."""


def install(rank: int) -> None:
    """Make ranks other than the chief put caches and snapshots next to the chief's.

    Two processes that write the same file would disturb each other.
    """
    if rank == 0:
        return
    handler = partial(_of_this_rank, f".rank{rank}")
    tf_patches.TABLE.install(
        {tf_patches.DATASET_CACHE: handler, tf_patches.DATASET_SNAPSHOT: handler}
    )


def _of_this_rank(
    ending: str,
    original: Callable[..., Dataset],
    dataset: Dataset,
    path: _File = "",
    *args: Any,
    **kwargs: Any,
) -> Dataset:
    # ``cache`` calls it a filename.
    path = kwargs.pop("filename", path)
    return original(dataset, _with(ending, path), *args, **kwargs)


def _with(ending: str, path: _File) -> _File:
    if isinstance(path, str | os.PathLike):
        text = os.fspath(path)
        # Without a name the cache is in memory.
        return f"{text.rstrip('/')}{ending}" if text else path
    if path is None:
        return path
    tensor = tf.convert_to_tensor(path)
    chosen: Tensor = tf.where(tf.strings.length(tensor) > 0, tensor + ending, tensor)
    return chosen
