"""When the cost of the exchanges of ``BatchNormalization`` is reported."""

from __future__ import annotations

from types import SimpleNamespace

from tfcluster.runtime.keras.train.batch_norm_cost import BatchNormCost


def said(step_s: float, exchange_s: float, steps: int = 40) -> list[str]:
    """What is said of steps with two exchanges each, of ``exchange_s`` seconds."""
    texts: list[str] = []
    now = 0.0
    done = SimpleNamespace(steps=0)
    cost = BatchNormCost(done, texts.append, clock=lambda: now)
    for _ in range(steps):
        for layer in ("first", "second"):
            with cost.exchanging(layer):
                now += exchange_s
        now += step_s - 2 * exchange_s
        done.steps += 1
    return texts


def test_a_high_cost_is_reported_once() -> None:
    (text,) = said(step_s=0.1, exchange_s=0.02)
    assert "of 2 BatchNormalization layers take 4" in text
    assert "batch_normalization: local" in text


def test_a_low_cost_is_not() -> None:
    assert said(step_s=0.1, exchange_s=0.004) == []


def test_a_few_steps_prove_nothing() -> None:
    assert said(step_s=0.01, exchange_s=0.004) == []
    assert said(step_s=0.5, exchange_s=0.2, steps=8) == []
