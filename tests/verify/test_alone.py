"""The baseline of a comparison is the program in a Python that starts as usual."""

from __future__ import annotations

from pathlib import Path

from tfcluster import config
from tfcluster.commands.verify_trial import alone, on_ranks
from tfcluster.plan.model import Strategy


def test_alone_is_a_plain_python(tmp_path: Path) -> None:
    words = ["python", "train.py"]
    described = config.from_command(words, count=2, environ={}, cwd=tmp_path)
    description = described.description
    by_itself = alone(description).runtime
    assert (by_itself.strategy, by_itself.warm_start) == (Strategy.NONE, False)
    assert on_ranks(description).runtime.warm_start
