"""Waiting for changes that nothing announces."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(
    condition: Callable[[], T],
    what: str | Callable[[], str],
    timeout_s: float = 30.0,
    *,
    poll_s: float = 0.01,
) -> T:
    """The first true value of ``condition``. Fails if none comes in time."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            text = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {timeout_s:g} s: {text}")
        time.sleep(poll_s)
    return value
