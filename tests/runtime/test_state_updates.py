"""How an update depends on an old value and on rows, found from a few trials."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from tfcluster.runtime.keras.state.state_updates import (
    SHIFT,
    Kind,
    Trial,
    agreed,
    kind_of,
)

Array = NDArray[np.float32]
Update = Callable[[Array, Array], Array]

ROWS = np.random.default_rng(3).normal(size=(7, 4)).astype(np.float32)
RUNNING_MAX, RUNNING_MIN = Kind("max", running=True), Kind("min", running=True)


def tried(update: Update, old: Array, rows: Array = ROWS) -> Kind | None:
    shift = (SHIFT * (1 + np.abs(old))).astype(np.float32)
    half = len(rows) // 2
    return kind_of(
        Trial(
            len(rows),
            shift,
            old,
            update(old, rows),
            update(old + shift, rows),
            update(old - shift, rows),
            update(old, rows[:half]),
            update(old, rows[half:]),
        )
    )


def decayed(old: Array, rows: Array) -> Array:
    new: Array = np.float32(0.75) * old + np.float32(0.25) * rows.sum(0)
    return new


@pytest.mark.parametrize("scale", [0.0, 1.0, -500.0])
@pytest.mark.parametrize(
    ("update", "kind"),
    [
        (lambda old, rows: old + len(rows), Kind("sum", 1.0)),
        (lambda old, rows: old + rows.sum(0), Kind("sum", 1.0)),
        (lambda old, rows: old + 1, Kind("mean", 1.0)),
        (lambda old, rows: old + rows.mean(0), Kind("mean", 1.0)),
        (lambda old, rows: 0 * old + rows.mean(0), Kind("mean")),
        (lambda old, rows: 0 * old + rows.sum(0), Kind("sum")),
        (lambda old, rows: 0 * old + rows.max(0), Kind("max")),
        (lambda old, rows: 0 * old + rows.std(0), Kind("other")),
        (lambda old, rows: old + rows.max(0), Kind("max", 1.0)),
        (lambda old, rows: np.maximum(old, rows.max(0)), RUNNING_MAX),
        (lambda old, rows: np.maximum(old, rows.max(0) + 600), RUNNING_MAX),
        (lambda old, rows: np.maximum(old, rows.max(0) * 9e4), RUNNING_MAX),
        (lambda old, rows: np.minimum(old, rows.min(0) - 600), RUNNING_MIN),
        (lambda old, rows: old * old, Kind("other")),
    ],
)
def test_kinds_of_updates(update: Update, kind: Kind, scale: float) -> None:
    old = scale * np.arange(1, 5, dtype=np.float32)
    found = tried(update, old)
    if not np.any(update(old, ROWS) - old):
        assert found is None
        return
    assert found is not None
    assert (found.how, found.running) == (kind.how, kind.running)
    assert found.how == "other" or found.slope == kind.slope


def test_moving_averages_are_distinguished_from_moving_sums() -> None:
    old = np.arange(4, dtype=np.float32)
    found = tried(decayed, old)
    assert found is not None
    assert found.how == "sum"
    assert found.slope == pytest.approx(0.75, abs=1e-6)


def test_one_row_tells_nothing() -> None:
    assert tried(decayed, np.zeros(4, np.float32), ROWS[:1]) is None


def test_ranks_that_know_decide() -> None:
    known = Kind("sum", 1.0)
    assert agreed([None, known, None]) == known
    assert agreed([known, Kind("mean", 1.0)]) == Kind("other", 1.0)
    assert agreed([None, None]) is None
