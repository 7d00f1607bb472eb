"""Group keys and instance keys, which identify TensorFlow's collective ops.

TensorFlow's own strategies count their keys from 1 (groups) and 100 (instances). Our
keys come from separate ranges, so that both work in one process. This module does not
use TensorFlow.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable
from typing import Any

GROUP_KEYS = range(1 << 29, 1 << 30)
NAMED_KEYS = range(1 << 30, 1 << 31)
"""The range of ``instance_key``'s results; keys are signed 32-bit integers."""


def instance_key(words: Iterable[object]) -> int:
    """The key of the operation named by ``words``.

    The key is a hash, so equal words give equal keys in every process and at any time:
    a rank that retraces its step, or traces it earlier than others, still uses a
    matching key. A counter would not ensure this. Two descriptions share a key with a
    probability of about 1e-9.
    """
    digest = hashlib.sha256(json.dumps([*map(str, words)]).encode()).digest()
    return NAMED_KEYS[int.from_bytes(digest[:8], "big") % len(NAMED_KEYS)]


class CollectiveKeys:
    """Keys for groups of devices.

    Processes that request the same keys in the same order get equal keys. Thread-safe;
    supports deepcopy.
    """

    def __init__(self, group_key_start: int = GROUP_KEYS.start) -> None:
        self._lock = threading.Lock()
        self._next_group_key = group_key_start
        self._group_keys: dict[tuple[str, ...], int] = {}

    def group_key(self, devices: Iterable[str]) -> int:
        """The key of a group of devices, which may be given in any order."""
        group = tuple(sorted(devices))
        with self._lock:
            if group not in self._group_keys:
                self._group_keys[group] = self._next_group_key
                self._next_group_key += 1
            return self._group_keys[group]

    def __deepcopy__(self, memo: dict[int, Any]) -> CollectiveKeys:
        # A lock cannot be copied.
        copied = CollectiveKeys()
        with self._lock:
            copied._next_group_key = self._next_group_key
            copied._group_keys = dict(self._group_keys)
        return copied
