"""How much a gradient has grown. The Keras cases test how this is used."""

from __future__ import annotations

import numpy as np
import pytest

from tfcluster.runtime.keras.checks.gradient_ratio import gradient_ratio

GRADIENT = [np.arange(6, dtype="float32").reshape(2, 3), np.array([-1.0, 0.5])]


@pytest.mark.parametrize("times", [1.0, 2.0, 1.3])
def test_it_is_how_many_times_it_is_there(times: float) -> None:
    ours = [array * array.dtype.type(times) for array in GRADIENT]
    assert gradient_ratio(ours, GRADIENT) == pytest.approx((times, 1.0))


def test_what_is_random_in_it_counts_for_little() -> None:
    generator = np.random.default_rng(3)
    signal = generator.normal(size=10_000)
    ours, chiefs = (signal + 0.5 * generator.normal(size=10_000) for _ in range(2))
    assert gradient_ratio([ours], [chiefs]).times < 1.0
    assert 1.4 < gradient_ratio([2 * ours], [chiefs]).times < 2.0


def test_what_is_random_has_another_direction() -> None:
    """A gradient that is shorter by chance does not mean a smaller loss."""
    generator = np.random.default_rng(3)
    signal = np.ones(1_000)
    chance = 0.5 * generator.normal(size=1_000)
    found = gradient_ratio([signal + chance], [0.5 * signal - 0.3 * chance])
    assert found.times > 1.5
    assert found.cosine < 0.9


@pytest.mark.parametrize(
    "chiefs",
    [[], [np.zeros(3)], [np.array([1.0, np.nan, 1.0])], [np.array([1.0, np.inf, 1.0])]],
    ids=["nothing", "zero", "nan", "infinite"],
)
def test_sometimes_nobody_can_say(chiefs: list[np.ndarray]) -> None:
    ours = [np.ones(3) for _ in chiefs]
    assert gradient_ratio(ours, chiefs) == (0.0, 0.0)


def test_half_precision_does_not_overflow() -> None:
    large = [np.full(1000, 60_000, np.float16)]
    assert gradient_ratio(large, large) == pytest.approx((1.0, 1.0))
