"""Tests of which GPUs an agent reports for its host."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.client import Agent
from tfcluster.agent.gpus import gpus


def test_all_of_the_drivers_are_ours_where_nobody_says_otherwise(
    tmp_path: Path,
) -> None:
    assert gpus({}, tmp_path / "none") == ()
    for name in ("0000:07:00.0", "0000:0a:00.0"):
        (tmp_path / name).mkdir()
    assert gpus({}, tmp_path) == ("0", "1")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("", ()),
        ("2", ("2",)),
        ("4, 7", ("4", "7")),
        ("GPU-a,MIG-b", ("GPU-a", "MIG-b")),
    ],
)
def test_what_is_visible_is_ours(
    given: str, named: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "0000:07:00.0").mkdir()
    assert gpus({"CUDA_VISIBLE_DEVICES": given}, tmp_path) == named


def test_the_agent_says_so(tmp_path: Path) -> None:
    prefix = ("env", "CUDA_VISIBLE_DEVICES=4,7")
    with Agent(tmp_path / "agent", prefix=prefix) as agent:
        assert agent.hello["gpus"] == ["4", "7"]
