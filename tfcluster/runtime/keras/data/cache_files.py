"""Files that datasets write: each rank gets its own cache and snapshot files."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from tfcluster.runtime.keras import patches


def install(rank: int) -> None:
    """Make ranks other than the chief put caches and snapshots beside the chief's.

    Two processes writing the same file would disturb each other.
    """
    if rank == 0:
        return
    ending = f".rank{rank}"
    patches.TABLE.install(
        {
            patches.DATASET_CACHE: partial(_cache, ending),
            patches.DATASET_SNAPSHOT: partial(_snapshot, ending),
        }
    )


def _cache(
    ending: str,
    original: Callable[..., Any],
    dataset: Any,
    filename: Any = "",
    name: str | None = None,
) -> Any:
    return original(dataset, _with(ending, filename), name=name)


def _snapshot(
    ending: str,
    original: Callable[..., Any],
    dataset: Any,
    path: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    return original(dataset, _with(ending, path), *args, **kwargs)


def _with(ending: str, path: Any) -> Any:
    if isinstance(path, str | os.PathLike):
        text = os.fspath(path)
        # Without a name the cache is in memory.
        return f"{text.rstrip('/')}{ending}" if text else path
    if path is None:
        return path
    path = tf.convert_to_tensor(path)
    return tf.where(tf.strings.length(path) > 0, path + ending, path)
