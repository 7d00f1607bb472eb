"""Tests of what the agent learns about a ``fit``: epoch, step, losses, metrics."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.harness import told

PROGRAM = Path(__file__).parent / "programs" / "fit_position.py"

pytestmark = [pytest.mark.tensorflow, pytest.mark.slow]


@pytest.fixture(scope="module")
def events() -> dict[str, list[dict[str, Any]]]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, check=True
    )
    return told(done.stdout, "EVENTS")[0]


def test_steps_bear_epoch_step_loss_and_metrics(
    events: dict[str, list[dict[str, Any]]],
) -> None:
    said = events["arrays"]
    *steps, after = [event for event in said if event["type"] == "step"]
    metrics = {"loss": 0.0, "mae": 0.0}
    places = [(1, 2, 1, 2), (1, 2, 2, 2), (2, 2, 1, 2), (2, 2, 2, 2)]
    assert [e["position"] for e in steps] == [[*place, metrics] for place in places]
    assert after["position"] is None
    epochs = [event for event in said if event["type"] == "epoch"]
    assert [event["epoch"] for event in epochs] == [1, 2]
    assert sorted(epochs[-1]["metrics"]) == ["loss", "mae", "val_loss", "val_mae"]


def test_the_number_of_steps_is_learnt_in_the_first_epoch(
    events: dict[str, list[dict[str, Any]]],
) -> None:
    *steps, _ = [event for event in events["unknown"] if event["type"] == "step"]
    known = [event["position"][3] for event in steps]
    assert known == [None, None, None, 3, 3, 3]
