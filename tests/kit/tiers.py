"""Which parameters of a test run in which tier."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(values: Iterable[str], *chosen: str) -> list[Any]:
    """Parameters of a test: ``chosen`` run in the default tier, the others are slow."""
    return [
        value if value in chosen else pytest.param(value, marks=pytest.mark.slow)
        for value in values
    ]
