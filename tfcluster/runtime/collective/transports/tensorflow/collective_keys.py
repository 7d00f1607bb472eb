"""Group keys and instance keys, which identify TensorFlow's collective ops.

TensorFlow's own strategies count their keys from 1 (groups) and 100 (instances). Our
keys come from separate ranges, so that both work in one process. This module does not
use TensorFlow.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

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
