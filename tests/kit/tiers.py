"""Which parameters of a test run in which tier."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(
    values: Iterable[str], *chosen: str, slow: Iterable[str] | None = None
) -> list[Any]:
    """Parameters of a test: ``chosen`` run in the default tier.

    Those in ``slow`` are slow, by default all others; the rest is exhaustive.
    """
    values = list(values)
    in_test_all = values if slow is None else [*slow]

    def marked(value: str) -> Any:
        if value in chosen:
            return value
        name = "slow" if value in in_test_all else "exhaustive"
        return pytest.param(value, marks=getattr(pytest.mark, name))

    return [marked(value) for value in values]
