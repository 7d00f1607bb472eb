"""Numbers by which TensorFlow's runtime tells groups of devices and exchanges apart.

TensorFlow's own strategies count theirs from 1 (groups) and 100 (instances): ours come
from ranges of their own, so that both work in one process. Knows no TensorFlow.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable
from typing import Any

GROUP_KEYS = range(1 << 29, 1 << 30)
NAMED_KEYS = range(1 << 30, (1 << 31) - (1 << 16))
"""Where ``instance_keys`` begin; all keys are signed 32 bit integers."""


def instance_keys(words: Iterable[object], count: int) -> range:
    """One key for each of ``count`` buckets of an exchange that ``words`` describe.

    The same words give the same keys in every process and at any time. So a rank that
    traces its step again, or earlier than others, still meets them: nothing is counted
    that could go astray. Different from each other by construction; two descriptions
    share a key once in a billion. Raises ValueError for more than 65536.
    """
    if count > 1 << 16:
        raise ValueError(f"an exchange has at most 65536 buckets, not {count}")
    digest = hashlib.sha256(json.dumps([*map(str, words)]).encode()).digest()
    start = NAMED_KEYS[int.from_bytes(digest[:8], "big") % len(NAMED_KEYS)]
    return range(start, start + count)


class CollectiveKeys:
    """Keys for groups of devices.

    Every process that asks for the same things in the same order gets the same keys.
    Safe to use from several threads, and to copy.
    """

    def __init__(self, group_key_start: int = GROUP_KEYS.start) -> None:
        self._lock = threading.Lock()
        self._next_group_key = group_key_start
        self._group_keys: dict[tuple[str, ...], int] = {}

    def group_key(self, devices: Iterable[str]) -> int:
        """The key of a group, whatever the order in which its devices are given."""
        group = tuple(sorted(devices))
        with self._lock:
            if group not in self._group_keys:
                self._group_keys[group] = self._next_group_key
                self._next_group_key += 1
            return self._group_keys[group]

    def __deepcopy__(self, memo: dict[int, Any]) -> CollectiveKeys:
        # A lock cannot be copied; all the rest has to be.
        copied = CollectiveKeys()
        with self._lock:
            copied._next_group_key = self._next_group_key
            copied._group_keys = dict(self._group_keys)
        return copied
